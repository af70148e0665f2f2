// Tests the video engines, operation by operation, against float64: every instruction set, both arithmetics, odd sizes.
#include <cmath>

#include "cases.h"
#include "video/engine.h"

namespace scope::video {
namespace {

using test::Random;

struct Case {
  std::string name;
  std::shared_ptr<Context> context;
  std::shared_ptr<Engine> engine;
  double products;      // relative rounding of what a linear layer multiplies
  double exact = 4e-6;  // and of what it does with bf16 numbers
};

std::vector<Case> engines() {
  std::vector<Case> out;
  if (test::testing_cuda()) {
    Case c{"cuda", std::make_shared<Context>(ContextOptions{.backend = "cuda"}), nullptr, 0x1p-8,
           2e-3};  // gelu's tanh is approximate
    c.engine = make_cuda_engine(*c.context);
    out.push_back(c);
    return out;
  }
  for (const auto& set : cpu::instruction_sets()) {
    for (const DType compute : {DType::f32, DType::bf16}) {
      Case c{fmt::format("{} {}", set.name, dtype_name(compute)), std::make_shared<Context>(3, set.name), nullptr, 0};
      c.engine = make_cpu_engine(*c.context, compute);
      c.products = compute == DType::bf16 ? 0x1p-8 : 0x1p-23;
      out.push_back(c);
    }
  }
  return out;
}

// A matrix in the engine's memory with its values as they are stored, and room behind it that nothing may touch.
class Stored {
 public:
  Stored(Engine& engine, DType dtype, int64_t rows, int64_t columns, std::vector<double> given = {})
      : engine_(engine), bytes_(rows * columns * dtype_bytes(dtype)), memory_(engine.allocate(bytes_ + kGuard)) {
    given.resize(static_cast<size_t>(rows * columns));
    std::vector<std::byte> host(static_cast<size_t>(bytes_ + kGuard), std::byte{0xa5});
    for (size_t i = 0; i < given.size(); ++i) {
      const auto x = static_cast<float>(given[i]);
      if (dtype == DType::f32) {
        std::memcpy(host.data() + 4 * i, &x, 4);
        given[i] = x;
      } else {
        const uint16_t bits = f32_to_bf16(x);
        std::memcpy(host.data() + 2 * i, &bits, 2);
        given[i] = bf16_to_f32(bits);
      }
    }
    engine.upload(host.data(), memory_.get(), std::ssize(host));
    matrix = {memory_.get(), dtype, rows, columns};
    values = std::move(given);
  }

  std::vector<double> read() const {
    std::vector<std::byte> host(static_cast<size_t>(bytes_ + kGuard));
    engine_.download(memory_.get(), host.data(), std::ssize(host));
    for (int64_t i = bytes_; i < std::ssize(host); ++i) EXPECT_EQ(host[static_cast<size_t>(i)], std::byte{0xa5});
    std::vector<double> out(values.size());
    for (size_t i = 0; i < out.size(); ++i) {
      float x = 0;
      uint16_t bits = 0;
      std::memcpy(&x, host.data() + 4 * i * (matrix.dtype == DType::f32), 4);
      std::memcpy(&bits, host.data() + 2 * i, 2);
      out[i] = matrix.dtype == DType::f32 ? x : bf16_to_f32(bits);
    }
    return out;
  }

  const float* floats() const { return static_cast<const float*>(matrix.data); }
  Matrix matrix;
  std::vector<double> values;

 private:
  static constexpr int64_t kGuard = 64;
  Engine& engine_;
  int64_t bytes_;
  Buffer memory_;
};

// Widths on a GPU are multiples of 8, but for what goes into a linear layer.
int64_t width(int64_t n) { return test::testing_cuda() ? round_up(n, 8) : n; }

class EngineTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!test::backend().present()) GTEST_SKIP() << "[GPU tests skipped]";
  }
};
using EngineOps = EngineTest;
using EngineOnCpu = EngineTest;

std::vector<double> normals(Random& random, int64_t n, double scale = 1) {
  std::vector<double> out(static_cast<size_t>(n));
  for (double& x : out) x = scale * random.normal();
  return out;
}

// |got - want| within `relative` of `size` at that place, and half a unit of the stored type's last place.
void expect_near(const std::vector<double>& got, const std::vector<double>& want, const std::vector<double>& size,
                 double relative, DType dtype, const std::string& what) {
  const double stored = dtype == DType::bf16 ? 0x1p-8 : 0x1p-23;
  for (size_t i = 0; i < want.size(); ++i) {
    const double most = relative * size[i] + stored * std::abs(want[i]) + 1e-6;
    ASSERT_NEAR(got[i], want[i], most) << what << ", element " << i;
  }
}

double after(Activation then, double x) {
  switch (then) {
    case Activation::none:
      return x;
    case Activation::gelu_tanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::gelu:
      return 0.5 * x * std::erfc(-x * M_SQRT1_2);
    case Activation::silu:
      return x / (1 + std::exp(-x));
  }
  return 0;
}

TEST_F(EngineOps, LinearLayers) {
  Random random(1);
  for (Case& c : engines()) {
    Engine& engine = *c.engine;
    for (int i = 0; i < 24; ++i) {
      const int64_t rows = random.pick<int64_t>({1, 2, 5, 6, 7, 95, 97, 400, 1300}),
                    in = random.pick<int64_t>({1, 2, 3, 48, 63, 257});
      const int64_t out = width(random.pick<int64_t>({1, 15, 16, 17, 64, 65, 300}));
      const DType from = random.pick<DType>({DType::f32, engine.attention}),
                  to = random.pick<DType>({DType::f32, engine.attention});
      const auto then = static_cast<Activation>(random.below(4));
      io::Array weights{io::ElementType::bf16, {out, in}, {}};
      std::vector<double> w = normals(random, in * out);
      weights.data.resize(static_cast<size_t>(2 * in * out));
      for (size_t k = 0; k < w.size(); ++k) {
        const uint16_t bits = f32_to_bf16(static_cast<float>(w[k]));
        std::memcpy(weights.data.data() + 2 * k, &bits, 2);
        w[k] = bf16_to_f32(bits);
      }
      const auto packed = engine.pack(weights, out, in);
      const Stored x(engine, from, rows, in, normals(random, rows * in)),
          bias(engine, DType::f32, 1, out, normals(random, out));
      const Stored y(engine, to, rows, out);
      const bool biased = random.chance(0.8);
      engine.linear({packed.get(), biased ? bias.floats() : nullptr}, x.matrix, y.matrix, then);
      std::vector<double> want(static_cast<size_t>(rows * out)), size = want;
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t o = 0; o < out; ++o) {
          double sum = biased ? bias.values[static_cast<size_t>(o)] : 0, all = std::abs(sum);
          for (int64_t k = 0; k < in; ++k) {
            const double p = x.values[static_cast<size_t>(r * in + k)] * w[static_cast<size_t>(o * in + k)];
            sum += p;
            all += std::abs(p);
          }
          want[static_cast<size_t>(r * out + o)] = after(then, sum);
          size[static_cast<size_t>(r * out + o)] = all;
        }
      }
      const double products = from == DType::bf16 ? c.exact : std::max(c.products, c.exact);  // bf16 input is exact
      // An activation is up to 1.13 times as steep as its input, which a device may have stored before.
      const double before = test::testing_cuda() && to == DType::bf16 ? 0x1p-8 : 0;
      const double relative = then == Activation::none ? products : 1.13 * (products + before);
      expect_near(y.read(), want, size, relative, to,
                  fmt::format("{}: {} x {} x {} then {}", c.name, rows, in, out, static_cast<int>(then)));
      const auto once = y.read();
      engine.linear({packed.get(), biased ? bias.floats() : nullptr}, x.matrix, y.matrix, then);
      ASSERT_EQ(y.read(), once) << c.name;
    }
  }
}

TEST_F(EngineOnCpu, RowsDoNotDependOnTheirNeighbours) {
  Random random(2);
  for (Case& c : engines()) {
    Engine& engine = *c.engine;
    const int64_t in = 70, out = 90;
    io::Array weights{io::ElementType::f32, {out, in}, std::vector<std::byte>(static_cast<size_t>(4 * in * out))};
    for (int64_t k = 0; k < in * out; ++k) {
      const auto x = static_cast<float>(random.normal());
      std::memcpy(weights.data.data() + 4 * k, &x, 4);
    }
    const auto packed = engine.pack(weights, out, in);
    const auto values = normals(random, 301 * in);
    const Stored all(engine, DType::f32, 301, in, values), y(engine, DType::f32, 301, out);
    engine.linear({packed.get(), nullptr}, all.matrix, y.matrix, Activation::none);
    const auto whole = y.read();
    for (const int64_t row : {0, 95, 96, 300}) {
      const Stored one(engine, DType::f32, 1, in, {values.begin() + row * in, values.begin() + (row + 1) * in});
      const Stored alone(engine, DType::f32, 1, out);
      engine.linear({packed.get(), nullptr}, one.matrix, alone.matrix, Activation::none);
      ASSERT_EQ(alone.read(), std::vector<double>(whole.begin() + row * out, whole.begin() + (row + 1) * out)) << c.name;
    }
  }
}

TEST_F(EngineOps, Norms) {
  Random random(3);
  for (Case& c : engines()) {
    Engine& engine = *c.engine;
    for (const int64_t any : {6, 12, 22, 128}) {
      const int64_t head_dim = width(any);
      const int64_t heads = random.between(1, 3), n = heads * head_dim, rows = random.pick<int64_t>({1, 97, 200});
      const double eps = random.pick<double>({1e-6, 1e-2});
      auto values = normals(random, rows * n, 3);
      for (double& x : values) x += 5;  // a mean that must be taken out
      const Stored x(engine, DType::f32, rows, n, values), scale(engine, DType::f32, 1, n, normals(random, n));
      const Stored shift(engine, DType::f32, 1, n, normals(random, n)),
          angle(engine, DType::f32, rows, head_dim, normals(random, rows * head_dim));
      for (const DType type : {DType::f32, engine.attention}) {
        for (const bool with : {false, true}) {
          const Stored y(engine, type, rows, n), z(engine, type, rows, n), by_head(engine, type, rows, n);
          engine.layer_norm(x.matrix, with ? scale.floats() : nullptr, with ? shift.floats() : nullptr,
                            static_cast<float>(eps), y.matrix);
          engine.rms_norm(x.matrix, scale.floats(), static_cast<float>(eps), with ? angle.floats() : nullptr, head_dim,
                          z.matrix);
          engine.head_norm(x.matrix, scale.floats(), static_cast<float>(eps), with ? angle.floats() : nullptr, head_dim,
                           by_head.matrix);
          std::vector<double> layer, rms, head_rms;
          for (int64_t r = 0; r < rows; ++r) {
            const double* row = x.values.data() + r * n;
            double mean = 0, variance = 0, square = 0;
            for (int64_t i = 0; i < n; ++i) mean += row[i] / static_cast<double>(n);
            for (int64_t i = 0; i < n; ++i) variance += (row[i] - mean) * (row[i] - mean) / static_cast<double>(n);
            for (int64_t i = 0; i < n; ++i) square += row[i] * row[i] / static_cast<double>(n);
            const auto over_row = [&](int64_t i) {
              return row[i] / std::sqrt(square + eps) * scale.values[static_cast<size_t>(i)];
            };
            const auto over_head = [&](int64_t i) {
              double sum = 0;
              for (int64_t k = i - i % head_dim; k < i - i % head_dim + head_dim; ++k) sum += row[k] * row[k];
              return row[i] / std::sqrt(sum / static_cast<double>(head_dim) + eps) *
                     scale.values[static_cast<size_t>(i % head_dim)];
            };
            for (int64_t i = 0; i < n; ++i) {
              const auto at = static_cast<size_t>(i);
              const double normed = (row[i] - mean) / std::sqrt(variance + eps);
              layer.push_back(with ? normed * scale.values[at] + shift.values[at] : normed);
              const int64_t pair = i % head_dim / 2, half = head_dim / 2;
              const double cosine = angle.values[static_cast<size_t>(r * head_dim + pair)];
              const double sine = angle.values[static_cast<size_t>(r * head_dim + half + pair)];
              const auto turned = [&](const auto& normed_at) {
                const double own = normed_at(i), other = normed_at(i % 2 == 0 ? i + 1 : i - 1);
                return !with ? own : i % 2 == 0 ? own * cosine - other * sine : other * sine + own * cosine;
              };
              rms.push_back(turned(over_row));
              head_rms.push_back(turned(over_head));
            }
          }
          const std::vector<double> size(layer.size(), 20);
          expect_near(y.read(), layer, size, 1e-6, type, c.name + " layer norm");
          expect_near(z.read(), rms, size, 1e-6, type, c.name + " rms norm");
          expect_near(by_head.read(), head_rms, size, 1e-6, type, c.name + " head norm");
        }
      }
    }
  }
}

// One pass over memory or two, over its input or not: the same bits.
TEST_F(EngineOps, ASumAndItsNorm) {
  Random random(6);
  for (Case& c : engines()) {
    Engine& engine = *c.engine;
    for (const int64_t any : {6, 130, 512, 1536, 3072, 5120, 8200}) {
      const int64_t n = width(any), rows = random.pick<int64_t>({1, 3, 37});
      const auto values = normals(random, rows * n, 3), more = normals(random, rows * n);
      const Stored gate(engine, DType::f32, 1, n, normals(random, n)), scale(engine, DType::f32, 1, n, normals(random, n)),
          shift(engine, DType::f32, 1, n, normals(random, n));
      for (const DType type : {DType::f32, engine.attention}) {
        for (const bool gated : {false, true}) {
          const float* by = gated ? gate.floats() : nullptr;
          const Stored x(engine, DType::f32, rows, n, values), y(engine, type, rows, n, more), out(engine, type, rows, n);
          engine.add(x.matrix, y.matrix, by);
          engine.layer_norm(x.matrix, gated ? scale.floats() : nullptr, gated ? shift.floats() : nullptr, 1e-6f, out.matrix);
          for (const bool in_place : {false, true}) {
            const Stored sum(engine, DType::f32, rows, n, values), z(engine, type, rows, n, more), to(engine, type, rows, n);
            const Stored& normed = in_place ? z : to;
            engine.add_norm(sum.matrix, z.matrix, by, gated ? scale.floats() : nullptr, gated ? shift.floats() : nullptr,
                            1e-6f, normed.matrix);
            ASSERT_EQ(sum.read(), x.read()) << c.name << ", " << n;
            ASSERT_EQ(normed.read(), out.read()) << c.name << ", " << n;
            if (!in_place) {
              ASSERT_EQ(z.read(), y.read()) << c.name << ", " << n;
            }
          }
        }
      }
    }
  }
}

TEST_F(EngineOps, SumsAndModulation) {
  Random random(4);
  for (Case& c : engines()) {
    Engine& engine = *c.engine;
    for (const int64_t any : {1, 15, 48, 130}) {
      const int64_t n = width(any);
      const int64_t rows = 101;
      for (const DType type : {DType::f32, engine.attention}) {
        const Stored x(engine, type, rows, n, normals(random, rows * n)),
            y(engine, engine.attention, rows, n, normals(random, rows * n));
        const Stored gate(engine, DType::f32, 1, n, normals(random, n)), copy(engine, engine.attention, rows, n);
        engine.convert(x.matrix, copy.matrix);
        expect_near(copy.read(), x.values, x.values, 0, engine.attention, c.name + " convert");
        std::vector<double> want, size;
        for (size_t i = 0; i < x.values.size(); ++i) {
          want.push_back(x.values[i] + y.values[i] * gate.values[i % static_cast<size_t>(n)]);
          size.push_back(std::abs(x.values[i]) + std::abs(y.values[i] * gate.values[i % static_cast<size_t>(n)]));
        }
        engine.add(x.matrix, y.matrix, gate.floats());
        expect_near(x.read(), want, size, 1e-6, type, c.name + " gated sum");
        const auto before = x.read();
        for (size_t i = 0; i < want.size(); ++i) want[i] = before[i] + y.values[i];
        engine.add(x.matrix, y.matrix, nullptr);
        expect_near(x.read(), want, size, 1e-6, type, c.name + " sum");
      }
      const Stored table(engine, DType::f32, 6, n, normals(random, 6 * n)),
          time(engine, DType::f32, 6, n, normals(random, 6 * n));
      const Stored out(engine, DType::f32, 6, n);
      engine.modulation(table.floats(), time.floats(), 6, n, 0b010010, static_cast<float*>(out.matrix.data));
      std::vector<double> want, size(static_cast<size_t>(6 * n), 3);
      for (int64_t i = 0; i < 6 * n; ++i) {
        const auto at = static_cast<size_t>(i);
        want.push_back(table.values[at] + time.values[at] + (i / n == 1 || i / n == 4 ? 1 : 0));
      }
      expect_near(out.read(), want, size, 1e-6, DType::f32, c.name + " modulation");
      const Stored sum(engine, DType::f32, 6, n, normals(random, 6 * n));
      engine.axpy(-0.25f, time.floats(), 6 * n, static_cast<float*>(sum.matrix.data));
      for (size_t i = 0; i < want.size(); ++i) want[i] = sum.values[i] - 0.25 * time.values[i];
      expect_near(sum.read(), want, size, 1e-6, DType::f32, c.name + " axpy");
      const float factors[] = {1.5f, -0.75f, 2.0f, 0.1f};
      for (size_t count = 1; count <= std::size(factors); ++count) {  // the sum goes into its first vector
        const Stored first(engine, DType::f32, 6, n, normals(random, 6 * n));
        std::vector<Term> terms = {{factors[0], first.floats()}};
        std::vector<Stored> others;
        for (size_t k = 1; k < count; ++k) {
          others.emplace_back(engine, DType::f32, 6, n, normals(random, 6 * n));
          terms.push_back({factors[k], others.back().floats()});
        }
        engine.combine(terms, 6 * n, static_cast<float*>(first.matrix.data));
        for (size_t i = 0; i < want.size(); ++i) {
          want[i] = factors[0] * first.values[i];
          for (size_t k = 1; k < count; ++k) want[i] += factors[k] * others[k - 1].values[i];
          size[i] = std::abs(want[i]) + 8;
        }
        expect_near(first.read(), want, size, 1e-6, DType::f32, c.name + " combine");
      }
    }
  }
}

// Latents and tokens by their definition: element (c, t, y, x) belongs to token (t / pt, y / ph, x / pw).
TEST_F(EngineOps, Patches) {
  Random random(5);
  for (Case& c : engines()) {
    Engine& engine = *c.engine;
    for (const PatchGrid g : {PatchGrid{3, 4, 5, 1, 2, 2}, PatchGrid{2, 3, 1, 2, 1, 3}, PatchGrid{1, 1, 1, 1, 1, 1},
                              PatchGrid{2, 9, 8, 1, 2, 2}}) {
      const int64_t channels = 3, more = random.below(3), all = channels + more;
      const int64_t t = g.t * g.pt, h = g.h * g.ph, w = g.w * g.pw, volume = t * h * w;
      const Stored latent(engine, DType::f32, channels, volume, normals(random, channels * volume));
      const Stored condition(engine, DType::f32, std::max<int64_t>(more, 1), volume,
                             normals(random, std::max<int64_t>(more, 1) * volume));
      const Stored tokens(engine, engine.activation, g.tokens(), all * g.patch());
      engine.patchify(g, latent.floats(), channels, condition.floats(), more, tokens.matrix);
      const Stored out(engine, DType::f32, g.tokens(), channels * g.patch(), normals(random, channels * volume));
      const Stored back(engine, DType::f32, channels, volume), slow(engine, DType::f32, channels, volume);
      engine.unpatchify(g, out.matrix, channels, ChannelOrder::fastest, static_cast<float*>(back.matrix.data));
      engine.unpatchify(g, out.matrix, channels, ChannelOrder::slowest, static_cast<float*>(slow.matrix.data));
      const auto got = tokens.read(), unpatched = back.read(), slowest = slow.read();
      for (int64_t i = 0; i < all * volume; ++i) {
        const int64_t channel = i / volume, a = i / (h * w) % t, y = i / w % h, x = i % w;
        const int64_t token = (a / g.pt * g.h + y / g.ph) * g.w + x / g.pw;
        const int64_t place = (a % g.pt * g.ph + y % g.ph) * g.pw + x % g.pw;
        const double value = channel < channels ? latent.values[static_cast<size_t>(i)]
                                                : condition.values[static_cast<size_t>(i - channels * volume)];
        ASSERT_NEAR(got[static_cast<size_t>((token * all + channel) * g.patch() + place)], value, std::abs(value) * 0x1p-8)
            << c.name;
        if (channel < channels) {
          ASSERT_EQ(unpatched[static_cast<size_t>(i)],
                    out.values[static_cast<size_t>((token * g.patch() + place) * channels + channel)])
              << c.name;
          ASSERT_EQ(slowest[static_cast<size_t>(i)],
                    out.values[static_cast<size_t>((token * channels + channel) * g.patch() + place)])
              << c.name;
        }
      }
    }
  }
}

TEST_F(EngineOps, LargeAndNonFiniteValuesPassActivations) {
  for (Case& c : engines()) {
    Engine& engine = *c.engine;
    io::Array identity{io::ElementType::f32, {8, 8}, std::vector<std::byte>(256)};
    const float unit = 1;
    for (size_t i = 0; i < 8; ++i) std::memcpy(identity.data.data() + 36 * i, &unit, 4);
    const auto packed = engine.pack(identity, 8, 8);
    std::vector<double> values;
    for (const double x : {-1e6, -200.0, 200.0, 1e6, std::nan("")}) values.insert(values.end(), 8, x);
    const Stored x(engine, DType::f32, 5, 8, values), y(engine, DType::f32, 5, 8);
    for (const Activation then : {Activation::gelu_tanh, Activation::gelu, Activation::silu}) {
      engine.linear({packed.get(), nullptr}, x.matrix, y.matrix, then);
      const auto got = y.read();
      EXPECT_NEAR(got[0], 0, 1e-30);
      EXPECT_NEAR(got[8], 0, 1e-30);
      EXPECT_EQ(got[16], 200);
      EXPECT_NEAR(got[24], 1e6, 1e6 * c.products);
      EXPECT_TRUE(std::isnan(got[32])) << c.name;
    }
  }
}

}  // namespace
}  // namespace scope::video
