// The engine on the CPU: packed products of the attention kernels as linear layers, and rows spread over the threads.
#include "video/engine.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <numeric>
#include <utility>

#include "core/normal.h"
#include "core/numeric.h"
#include "cpu/elementwise.h"
#include "cpu/kernels.h"
#include "video/weights.h"

namespace scope::video {

namespace {

constexpr int64_t kRows = 96;            // of x that share a block of weights while it is in the cache; a multiple of kStrip
constexpr int64_t kTileColumns = 256;    // of a tile; a multiple of every panel
constexpr int64_t kBlockFloats = 65536;  // weights of a tile, at most so many or one panel

struct PackedWeights : Weights {
  std::vector<float> panels;  // [ceil(out / panel), depth, panel]; words of two channels in bf16
  int64_t depth = 0;          // of a panel: in, or pairs of it
};

class CpuEngine : public Engine {
 public:
  CpuEngine(const Context& on, DType compute)
      : Engine(on, DType::f32, compute),
        own_(on.host() ? nullptr : std::make_unique<Context>(on.threads())),
        exec_(own_ == nullptr ? on.exec() : own_->exec()),
        rows_(cpu::row_kernels(exec_.kernels->name)),
        bf16_(compute == DType::bf16),
        dots_(bf16_ && exec_.attend_kernels_bf16 != nullptr ? *exec_.attend_kernels_bf16 : *exec_.attend_kernels),
        scratch_(static_cast<size_t>(on.threads())) {}

  Buffer allocate(int64_t bytes) override {
    const auto size = static_cast<size_t>(round_up(std::max<int64_t>(bytes, 1), 64));
    void* memory = std::aligned_alloc(64, size);
    if (memory == nullptr) throw std::bad_alloc();
    return Buffer(memory, std::free);
  }
  void upload(const void* host, void* to, int64_t bytes) override { move(host, to, bytes); }
  void download(const void* from, void* host, int64_t bytes) override { move(from, host, bytes); }
  void wait() override {}
  MemoryUse memory() const override {
    MemoryUse use{};
    int64_t pages = 0, of_process = 0, kilobytes = 0;
    std::ifstream("/proc/self/statm") >> pages >> of_process;
    use.used = of_process * sysconf(_SC_PAGESIZE);
    std::ifstream info("/proc/meminfo");
    for (std::string word; info >> word;) {
      if (word == "MemAvailable:" && info >> kilobytes) use.free = kilobytes * 1024;
    }
    return use;
  }

  std::unique_ptr<Weights> pack(const io::Array& matrix, int64_t out, int64_t in) override {
    auto packed = std::make_unique<PackedWeights>();
    packed->in = in;
    packed->out = out;
    const bool pairs = dots_.element == 2;
    packed->depth = pairs ? ceil_div(in, 2) : in;
    packed->panels.resize(static_cast<size_t>(round_up(out, dots_.panel) * packed->depth));
    std::vector<float> values = to_f32(matrix);
    if (bf16_) {
      for (float& value : values) value = bf16_to_f32(f32_to_bf16(value));
    }
    const RowsView rows{values.data(), DType::f32, out, in, in};
    const int64_t stride = round_up(in, 2 * cpu::kLanes);
    const int64_t step = packed->depth * dots_.panel;
    exec_.pool->run(ceil_div(out, dots_.panel), [&](int64_t panel, int thread) {
      const int64_t first = panel * dots_.panel, n = std::min(dots_.panel, out - first);
      std::vector<int32_t> index(static_cast<size_t>(n));
      std::iota(index.begin(), index.end(), static_cast<int32_t>(first));
      float* buffer = scratch(thread, dots_.panel * stride);
      dots_.pack_k(*exec_.kernels, rows, index.data(), n, packed->panels.data() + panel * step, buffer, stride);
    });
    return packed;
  }

  std::unique_ptr<Weights> draw_weights(const RandomStream& from, float deviation, int64_t out, int64_t in) override {
    io::Array matrix{io::ElementType::f32, {out, in}, std::vector<std::byte>(static_cast<size_t>(out * in) * sizeof(float))};
    draw(from, 0, deviation, {matrix.data.data(), DType::f32, out, in});
    return pack(matrix, out, in);
  }

  void draw(const RandomStream& from, float mean, float deviation, Matrix x) override {
    constexpr int64_t kNumbers = 4096;  // of a task; a multiple of 4
    const int64_t n = x.rows * x.columns;
    exec_.pool->run(ceil_div(n, kNumbers), [&](int64_t task, int) {
      float numbers[kNumbers];
      for (int64_t i = 0; i < kNumbers; i += 4) {
        const FourNormals four = four_normals(from, static_cast<uint64_t>(task * kNumbers + i) / 4);
        for (int64_t j = 0; j < 4; ++j) numbers[i + j] = mean + deviation * four.number[j];
      }
      store(numbers, std::min(kNumbers, n - task * kNumbers), {x.data, x.dtype, 1, n}, 0, task * kNumbers);
    });
  }

  // A task is some rows of x against some columns: all of them, unless there are too few rows to keep the threads busy.
  void linear(const Linear& layer, Matrix x, Matrix out, Activation then) override {
    const auto start = std::chrono::steady_clock::now();
    const auto& weights = static_cast<const PackedWeights&>(*layer.weights);
    const int64_t row_blocks = ceil_div(x.rows, kRows);
    const int64_t tile = std::clamp(kBlockFloats / weights.depth / dots_.panel * dots_.panel, dots_.panel, kTileColumns);
    const int64_t tiles = ceil_div(weights.out, tile);
    const int64_t parts = row_blocks >= 4 * context.threads() ? 1 : tiles;
    exec_.pool->run(row_blocks * parts, [&](int64_t task, int thread) {
      const int64_t first = task / parts * kRows, rows = std::min(kRows, x.rows - first);
      const int64_t stride = round_up(weights.in, 2 * cpu::kLanes);
      float* products = scratch(thread, kRows * (kTileColumns + stride));
      const void* a = products + kRows * kTileColumns;
      int64_t a_stride = stride;
      if (dots_.element == 4 && x.dtype == DType::f32 && !bf16_) {
        a = static_cast<const float*>(x.data) + first * x.columns;
        a_stride = x.columns;
      } else {
        gather(x, first, rows, products + kRows * kTileColumns, stride);
      }
      for (int64_t t = parts == 1 ? 0 : task % parts; t < (parts == 1 ? tiles : task % parts + 1); ++t) {
        const int64_t column = t * tile, columns = std::min(tile, weights.out - column);
        const float* panels = weights.panels.data() + column * weights.depth;
        for (int64_t i = 0; i < rows; i += cpu::kStrip) {
          dots_.dot(static_cast<const std::byte*>(a) + i * a_stride * dots_.element, a_stride,
                    std::min(cpu::kStrip, rows - i), panels, columns, weights.in, products + i * kTileColumns, kTileColumns);
        }
        for (int64_t i = 0; i < rows; ++i) {
          float* row = products + i * kTileColumns;
          if (layer.bias != nullptr) rows_.add_scaled(layer.bias + column, nullptr, columns, row);
          activate(then, row, columns);
          store(row, columns, out, first + i, column);
        }
      }
    });
    if (!timing_) return;
    LinearTime& time = times_[{x.rows, weights.out, weights.in, out.dtype}];
    ++time.calls;
    time.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  void layer_norm(Matrix x, const float* scale, const float* shift, float eps, Matrix out) override {
    each_row(x, [&](int64_t i, float* row) {
      rows_.layer_norm(row_of(x, i), x.columns, scale, shift, eps, row);
      store(row, x.columns, out, i, 0);
    });
  }

  void rms_norm(Matrix x, const float* weight, float eps, const float* rotation, int64_t head_dim, Matrix out) override {
    each_row(x, [&](int64_t i, float* row) {
      rows_.rms_norm(row_of(x, i), x.columns, weight, eps, row);
      if (rotation != nullptr) turn(row, x.columns, rotation + i * head_dim, head_dim);
      store(row, x.columns, out, i, 0);
    });
  }

  void head_norm(Matrix x, const float* weight, float eps, const float* rotation, int64_t head_dim, Matrix out) override {
    each_row(x, [&](int64_t i, float* row) {
      for (int64_t c = 0; c < x.columns; c += head_dim) rows_.rms_norm(row_of(x, i) + c, head_dim, weight, eps, row + c);
      if (rotation != nullptr) turn(row, x.columns, rotation + i * head_dim, head_dim);
      store(row, x.columns, out, i, 0);
    });
  }

  void convert(Matrix x, Matrix out) override {
    each_row(x, [&](int64_t i, float* row) {
      load(x, i, row);
      store(row, x.columns, out, i, 0);
    });
  }

  void add(Matrix x, Matrix y, const float* gate) override {
    const int64_t padded = round_up(x.columns, cpu::kLanes);
    exec_.pool->run(ceil_div(x.rows, kRows), [&](int64_t block, int thread) {
      float* more = scratch(thread, 2 * padded);
      float* sum = more + padded;
      for (int64_t i = block * kRows; i < std::min((block + 1) * kRows, x.rows); ++i) {
        load(y, i, more);
        load(x, i, sum);
        rows_.add_scaled(more, gate, x.columns, sum);
        store(sum, x.columns, x, i, 0);
      }
    });
  }

  void modulation(const float* table, const float* time, int64_t rows, int64_t columns, uint32_t plus_one,
                  float* out) override {
    for (int64_t r = 0; r < rows; ++r) {
      const float one = (plus_one >> r & 1u) != 0 ? 1.0f : 0.0f;
      for (int64_t c = r * columns; c < (r + 1) * columns; ++c) out[c] = table[c] + time[c] + one;
    }
  }

  void patchify(const PatchGrid& grid, const float* latent, int64_t channels, const float* more, int64_t more_channels,
                Matrix out) override {
    each_row(out, [&](int64_t patch, float* row) {
      float* to = row;
      for (int64_t c = 0; c < channels + more_channels; ++c) {
        const float* from = c < channels ? latent : more;
        visit(grid, patch, c < channels ? c : c - channels, [&](int64_t at) { *to++ = from[at]; });
      }
      store(row, out.columns, out, token_of(grid, patch), 0);
    });
  }

  void unpatchify(const PatchGrid& grid, Matrix x, int64_t channels, ChannelOrder order, float* latent) override {
    const bool slowest = order == ChannelOrder::slowest;
    each_row(x, [&](int64_t patch, float* row) {
      load(x, token_of(grid, patch), row);
      for (int64_t c = 0; c < channels; ++c) {
        const float* from = row + (slowest ? c * grid.patch() : c);
        visit(grid, patch, c, [&](int64_t at) {
          latent[at] = *from;
          from += slowest ? 1 : channels;
        });
      }
    });
  }

  void axpy(float factor, const float* y, int64_t n, float* x) override {
    for (int64_t i = 0; i < n; ++i) x[i] += factor * y[i];
  }

  void combine(std::span<const Term> terms, int64_t n, float* out) override {
    for (int64_t i = 0; i < n; ++i) {
      float sum = 0;
      for (const Term& term : terms) sum += term.factor * term.x[i];
      out[i] = sum;
    }
  }

  void time_linear(bool on) override { timing_ = on; }
  LinearTimes take_linear_times() override { return std::exchange(times_, {}); }
  std::vector<double> time_algorithms(const LinearShape&) override { return {}; }

 private:
  static void move(const void* from, void* to, int64_t bytes) {
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));  // an empty vector's pointer may be null
  }

  float* scratch(int thread, int64_t floats) {
    auto& memory = scratch_[static_cast<size_t>(thread)];
    if (std::ssize(memory) < floats) memory.resize(static_cast<size_t>(floats));
    return memory.data();
  }

  static float* row_of(Matrix x, int64_t i) { return static_cast<float*>(x.data) + i * x.columns; }

  // Turns neighbouring channels of each head by a token's cosines, then sines.
  static void turn(float* row, int64_t columns, const float* cosine, int64_t head_dim) {
    const float* sine = cosine + head_dim / 2;
    for (float* head = row; head < row + columns; head += head_dim) {
      for (int64_t c = 0; c < head_dim / 2; ++c) {
        const float a = head[2 * c], b = head[2 * c + 1];
        head[2 * c] = a * cosine[c] - b * sine[c];
        head[2 * c + 1] = a * sine[c] + b * cosine[c];
      }
    }
  }

  // body(row index, room for one row), rows spread over the threads.
  template <class Body>
  void each_row(Matrix x, const Body& body) {
    exec_.pool->run(ceil_div(x.rows, kRows), [&](int64_t block, int thread) {
      float* row = scratch(thread, round_up(x.columns, cpu::kLanes));
      for (int64_t i = block * kRows; i < std::min((block + 1) * kRows, x.rows); ++i) body(i, row);
    });
  }

  static int64_t token_of(const PatchGrid& g, int64_t patch) { return g.places == nullptr ? patch : g.places[patch]; }

  // Latent elements of a patch in one channel, in raster order.
  template <class Body>
  static void visit(const PatchGrid& g, int64_t patch, int64_t channel, const Body& body) {
    const int64_t t = patch / (g.h * g.w), h = patch / g.w % g.h, w = patch % g.w;
    for (int64_t a = 0; a < g.pt; ++a) {
      for (int64_t b = 0; b < g.ph; ++b) {
        const int64_t row = ((channel * g.t + t) * g.pt + a) * g.h * g.ph + h * g.ph + b;
        for (int64_t c = 0; c < g.pw; ++c) body(row * g.w * g.pw + w * g.pw + c);
      }
    }
  }

  void load(Matrix x, int64_t i, float* row) const {
    const auto at = static_cast<int32_t>(i);
    exec_.kernels->load_rows({x.data, x.dtype, x.rows, x.columns, x.columns}, &at, 1, row, round_up(x.columns, cpu::kLanes));
  }

  void store(const float* row, int64_t columns, Matrix out, int64_t i, int64_t column) const {
    auto* to = static_cast<std::byte*>(out.data) + (i * out.columns + column) * dtype_bytes(out.dtype);
    exec_.kernels->store_row(row, 1.0f, columns, out.dtype, to);
  }

  // Rows of x in the arithmetic's own format.
  void gather(Matrix x, int64_t first, int64_t rows, float* to, int64_t stride) const {
    int32_t index[kRows];
    std::iota(index, index + rows, static_cast<int32_t>(first));
    const RowsView view{x.data, x.dtype, x.rows, x.columns, x.columns};
    dots_.pack_q(*exec_.kernels, view, index, rows, to, stride);
    if (bf16_ && dots_.element == 4) {  // no bf16 products here: the same numbers in f32's
      for (int64_t i = 0; i < rows * stride; ++i) to[i] = bf16_to_f32(f32_to_bf16(to[i]));
    }
  }

  void activate(Activation then, float* row, int64_t n) const {
    switch (then) {
      case Activation::none:
        return;
      case Activation::gelu_tanh:
        return rows_.gate_sigmoid(row, n, 1.5957691216f, 0.044715f);
      case Activation::silu:
        return rows_.gate_sigmoid(row, n, 1.0f, 0.0f);
      case Activation::gelu:  // of a few hundred image tokens
        for (int64_t i = 0; i < n; ++i) row[i] *= 0.5f * std::erfc(-0.70710678f * row[i]);
    }
  }

  std::unique_ptr<Context> own_;  // for a context that is not the host's
  const Exec& exec_;
  const cpu::RowKernels& rows_;
  bool bf16_;
  const cpu::AttendKernels& dots_;
  std::vector<std::vector<float>> scratch_;  // of each thread
  bool timing_ = false;
  LinearTimes times_;
};

}  // namespace

std::unique_ptr<Engine> make_cpu_engine(const Context& context, DType compute) {
  require(compute == DType::f32 || compute == DType::bf16, Status::dtype, "compute: got {}, expected f32 or bf16",
          dtype_name(compute));
  return std::make_unique<CpuEngine>(context, compute);
}

}  // namespace scope::video
