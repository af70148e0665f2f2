// The generator behind `scope make-qkv`.
#include "measure/synthetic.h"

#include <cmath>
#include <numbers>

#include "core/numeric.h"
#include "core/random.h"

namespace scope {

namespace {

constexpr int64_t kObjects = 6;
constexpr int64_t kWaves = 10;                    // sine waves of the background texture
constexpr int64_t kFeatures = kObjects + kWaves;  // content of one token
constexpr double kRopeBase = 10000.0;

// Independent normal draws: the stream's `subspace` names what they are for, so adding one kind never shifts another.
class Normal {
 public:
  Normal(uint64_t seed, uint32_t what, uint32_t head)
      : stream_{.seed = seed, .tensor = head, .subspace = what, .purpose = 3} {}
  double uniform(int64_t i) const { return stream_.uniform(static_cast<uint64_t>(i)); }
  double operator()(int64_t i) const {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform(2 * i)));
    return radius * std::cos(2.0 * std::numbers::pi * uniform(2 * i + 1));
  }

 private:
  RandomStream stream_;
};

// What is at a place of the video: soft membership in objects that move, over a texture that pans.
class Scene {
 public:
  explicit Scene(uint64_t seed) : draw_(seed, 0, 0) {}

  void features(double t, double y, double x, double* out) const {
    for (int64_t m = 0; m < kObjects; ++m) {
      const double cy = draw_.uniform(8 * m) + 0.35 * (draw_.uniform(8 * m + 1) - 0.5) * t;
      const double cx = draw_.uniform(8 * m + 2) + 0.9 * (draw_.uniform(8 * m + 3) - 0.5) * t;
      const double radius = 0.08 + 0.14 * draw_.uniform(8 * m + 4);
      const double dy = y - cy, dx = x - cx;
      out[m] = 2.0 * std::exp(-(dy * dy + dx * dx) / (2 * radius * radius));
    }
    for (int64_t w = 0; w < kWaves; ++w) {
      const int64_t at = 1000 + 8 * w;
      const double wy = 1.0 + 5.0 * draw_.uniform(at), wx = 1.0 + 5.0 * draw_.uniform(at + 1);
      const double pan = 0.3 * (draw_.uniform(at + 2) - 0.5);
      const double phase = draw_.uniform(at + 3) + wy * y + wx * (x - pan * t);
      out[kObjects + w] = 0.6 * std::sin(2.0 * std::numbers::pi * phase);
    }
  }

 private:
  Normal draw_;
};

void normalise(double* x, int64_t dim, double gain) {
  double sum = 0;
  for (int64_t c = 0; c < dim; ++c) sum += x[c] * x[c];
  const double factor = gain / std::sqrt(sum / static_cast<double>(dim) + 1e-6);
  for (int64_t c = 0; c < dim; ++c) x[c] *= factor;
}

// 1 / base^(2i / range) for every channel pair of every axis' range.
std::vector<double> rope_frequencies(const std::vector<int64_t>& rope) {
  std::vector<double> frequencies;
  for (const int64_t range : rope) {
    for (int64_t i = 0; i < range; i += 2) {
      frequencies.push_back(std::pow(kRopeBase, -static_cast<double>(i) / static_cast<double>(range)));
    }
  }
  return frequencies;
}

// Rotates interleaved channel pairs of each axis' range by position x frequency.
void rotate(double* x, const std::vector<int64_t>& rope, const double* frequency, const int64_t* place) {
  for (size_t axis = 0; axis < 3; ++axis) {
    for (int64_t i = 0; i < rope[axis]; i += 2) {
      const double angle = static_cast<double>(place[axis]) * *frequency++;
      const double c = std::cos(angle), s = std::sin(angle), a = x[i], b = x[i + 1];
      x[i] = a * c - b * s;
      x[i + 1] = a * s + b * c;
    }
    x += rope[axis];
  }
}

// One head's maps from a token's content to q, k and v.
struct HeadWeights {
  std::vector<double> bias, q, k, v;  // [dim], then [dim, kFeatures] each
  double gain = 0;

  HeadWeights(uint64_t seed, uint32_t head, int64_t dim) {
    const Normal draw(seed, 1, head);
    // Heads differ as in a trained model: some look near, some at what looks alike, some sharply, some diffusely.
    const double locality = 0.4 + 0.8 * draw.uniform(900'001);
    gain = 1.15 + 0.25 * draw.uniform(900'002);
    for (int64_t c = 0; c < dim; ++c) bias.push_back(locality * draw(500'000 + c));
    for (int64_t i = 0; i < dim * kFeatures; ++i) {
      const double shared = 0.5 * draw(i);
      q.push_back(shared + 0.15 * draw(100'000 + i));
      k.push_back(shared + 0.15 * draw(200'000 + i));
      v.push_back(0.5 * draw(300'000 + i));
    }
  }
};

double dot(const double* a, const double* b) {
  double sum = 0;
  for (int64_t i = 0; i < kFeatures; ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace

SyntheticQkv make_qkv(const SyntheticSpec& spec, ThreadPool& pool, const std::function<void()>& done) {
  int64_t tokens = 1, dim = 0;
  for (const int64_t n : spec.grid) {
    require(n >= 1, Status::shape, "grid: got {}, expected every side >= 1", n);
    tokens = checked_mul(tokens, n, "grid");
  }
  require(tokens <= (1 << 24), Status::size_limit, "grid: got {} tokens, expected at most {}", tokens, 1 << 24);
  require(spec.rope.size() == 3, Status::shape, "rope: got {} ranges, expected 3", spec.rope.size());
  for (const int64_t n : spec.rope) {
    require(n >= 2 && n % 2 == 0 && n <= 256, Status::shape,
            "rope: got a range of {} channels, expected an even number in 2..256", n);
    dim += n;
  }
  require(dim <= 256, Status::unsupported, "rope: the ranges hold {} channels, expected at most 256", dim);
  require(spec.heads >= 1 && spec.heads <= 4096, Status::shape, "heads: got {}, expected 1..4096", spec.heads);

  SyntheticQkv out{.heads = spec.heads, .tokens = tokens, .dim = dim, .q = {}, .k = {}, .v = {}};
  const auto size = static_cast<size_t>(checked_mul(checked_mul(spec.heads, tokens, "q, k, v"), dim, "q, k, v"));
  out.q.resize(size);
  out.k.resize(size);
  out.v.resize(size);
  const Scene scene(spec.seed);
  const std::vector<double> frequencies = rope_frequencies(spec.rope);
  const int64_t frame = spec.grid[1] * spec.grid[2];
  for (int64_t head = 0; head < spec.heads; ++head) {
    const auto h = static_cast<uint32_t>(head);
    const Normal noise(spec.seed, 2, h);
    const HeadWeights weights(spec.seed, h, dim);
    pool.run(spec.grid[0], [&](int64_t t, int) {
      std::vector<double> x(static_cast<size_t>(3 * dim));
      double* q = x.data();
      double* k = q + dim;
      double* v = k + dim;
      for (int64_t p = 0; p < frame; ++p) {
        const int64_t place[3] = {t, p / spec.grid[2], p % spec.grid[2]};
        const int64_t token = t * frame + p;
        double f[kFeatures];
        scene.features(static_cast<double>(t) / static_cast<double>(spec.grid[0]),
                       static_cast<double>(place[1]) / static_cast<double>(spec.grid[1]),
                       static_cast<double>(place[2]) / static_cast<double>(spec.grid[2]), f);
        for (int64_t c = 0; c < dim; ++c) {
          const int64_t draw = (token * dim + c) * 3;
          q[c] = weights.bias[c] + dot(f, &weights.q[c * kFeatures]) + 0.35 * noise(draw);
          k[c] = weights.bias[c] + dot(f, &weights.k[c * kFeatures]) + 0.35 * noise(draw + 1);
          v[c] = dot(f, &weights.v[c * kFeatures]) + 0.2 * noise(draw + 2);
        }
        normalise(q, dim, weights.gain);
        normalise(k, dim, weights.gain);
        rotate(q, spec.rope, frequencies.data(), place);
        rotate(k, spec.rope, frequencies.data(), place);
        const int64_t at = (head * tokens + token) * dim;
        for (int64_t c = 0; c < dim; ++c) {
          out.q[static_cast<size_t>(at + c)] = static_cast<float>(q[c]);
          out.k[static_cast<size_t>(at + c)] = static_cast<float>(k[c]);
          out.v[static_cast<size_t>(at + c)] = static_cast<float>(v[c]);
        }
      }
    });
    done();
  }
  return out;
}

}  // namespace scope
