// What the transformer asks of a machine: memory, linear layers, and the few steps between them.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/random.h"
#include "io/file.h"
#include "pipeline/plan.h"
#include "video/matrix.h"

namespace scope::video {

// Memory of an engine, freed with the last copy.
using Buffer = std::shared_ptr<void>;

// The matrix of a linear layer [out, in], as an engine keeps it.
class Weights {
 public:
  virtual ~Weights() = default;
  int64_t in = 0, out = 0;
};
inline constexpr int64_t kFp8Sizes = 16;  // inputs and outputs of a layer in fp8 are multiples
inline bool fits_fp8(const Weights& weights) { return weights.in % kFp8Sizes == 0 && weights.out % kFp8Sizes == 0; }

struct Linear {
  const Weights* weights = nullptr;
  const float* bias = nullptr;  // [out] in the engine's memory, the same at every call
};

// What the large linear layers of a model's blocks multiply: the engine's own type, or fp8 (e4m3) with an f32 scale for each
// output channel of the weights and for each token. fp8 adds up in f32, fp8_fast in the tensor cores alone, with about 13
// bits on sm_90.
enum class LinearMode { plain, fp8, fp8_fast };

// The product of a linear layer: [rows, in] . [out, in]^T, into a type.
struct LinearShape {
  int64_t rows, out, in;
  DType type;
  bool fp8 = false;  // of e4m3
  double flop() const { return 2.0 * static_cast<double>(rows) * static_cast<double>(out) * static_cast<double>(in); }
  bool operator<(const LinearShape& b) const {
    return std::tie(rows, out, in, type, fp8) < std::tie(b.rows, b.out, b.in, b.type, b.fp8);
  }
};
struct LinearTime {
  int64_t calls = 0;
  double seconds = 0;
};
using LinearTimes = std::map<LinearShape, LinearTime>;

struct MemoryUse {
  int64_t used, free;  // bytes
};

// Calls are made in order from one thread. On a device they only queue work: download and wait wait for it, and what is
// passed must live until then. Pointers are the engine's memory unless said otherwise. Matrices that are written overlap no
// other one.
class Engine {
 public:
  Engine(const Context& on, DType between, DType of_attention, LinearMode mode = LinearMode::plain)
      : context(on), activation(between), attention(of_attention), linear_mode(mode) {}
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  virtual ~Engine() = default;

  const Context& context;
  const DType activation;  // between linear layers
  const DType attention;   // of q, k, v and what attention gives
  const LinearMode linear_mode;
  void* stream = nullptr;  // a device's: of every call, attention's too

  virtual Buffer allocate(int64_t bytes) = 0;
  virtual void upload(const void* host, void* to, int64_t bytes) = 0;
  virtual void download(const void* from, void* host, int64_t bytes) = 0;
  virtual void wait() = 0;               // until all queued work is done
  virtual MemoryUse memory() const = 0;  // of the device; on the host, what this process uses and what is left
  virtual std::unique_ptr<Weights> pack(const io::Array& matrix, int64_t out, int64_t in) = 0;  // of f32, bf16 or f16
  // The same of normals, so that a layer without weights takes no way through the host.
  virtual std::unique_ptr<Weights> draw_weights(const RandomStream& from, float deviation, int64_t out, int64_t in) = 0;
  // Keeps a matrix as the linear mode multiplies it, if its sizes allow that; plain: nothing happens. name: for the error
  // Status::non_finite where a row holds NaN or Inf.
  virtual void quantise(Weights&, const std::string& /*name*/) {}
  // Matrices that `quantise` had to leave as they are, by inputs and outputs.
  std::map<std::pair<int64_t, int64_t>, int64_t> not_quantised;
  // x = mean + deviation * the normals of the stream, in order (core/normal.h).
  virtual void draw(const RandomStream& from, float mean, float deviation, Matrix x) = 0;

  // out = then(x . weights^T + bias); any types.
  virtual void linear(const Linear& layer, Matrix x, Matrix out, Activation then = Activation::none) = 0;
  // out = (x - mean) / sqrt(variance + eps) * scale + shift by rows; x is f32; null scale and shift: 1 and 0.
  virtual void layer_norm(Matrix x, const float* scale, const float* shift, float eps, Matrix out) = 0;
  // x += gate * y as `add`, then out = its layer_norm, with the bits of both; out may be y. Engines that can read x once do.
  virtual void add_norm(Matrix x, Matrix y, const float* gate, const float* scale, const float* shift, float eps,
                        Matrix out) {
    add(x, y, gate);
    layer_norm(x, scale, shift, eps, out);
  }
  // out = x / sqrt(mean square + eps) * weight by rows, then neighbouring channels (2i, 2i + 1) of each head turned by the
  // token's angles; rotation [rows, 2, head_dim / 2] holds their cosines and sines; null: not turned.
  virtual void rms_norm(Matrix x, const float* weight, float eps, const float* rotation, int64_t head_dim, Matrix out) = 0;
  // The same for each head of a row by itself; weight [head_dim].
  virtual void head_norm(Matrix x, const float* weight, float eps, const float* rotation, int64_t head_dim, Matrix out) = 0;
  // out = x, in another type.
  virtual void convert(Matrix x, Matrix out) = 0;
  // x += gate * y, gate [columns]; null: 1.
  virtual void add(Matrix x, Matrix y, const float* gate) = 0;
  // out [rows, columns] = table + time, and 1 more in the rows of the bitmask `plus_one`. All f32.
  virtual void modulation(const float* table, const float* time, int64_t rows, int64_t columns, uint32_t plus_one,
                          float* out) = 0;
  // f32 latents [channels, T, H, W], then [more_channels, …] -> [tokens, channels x patch], channel slowest.
  virtual void patchify(const PatchGrid& grid, const float* latent, int64_t channels, const float* more,
                        int64_t more_channels, Matrix out) = 0;
  // f32 [tokens, patch x channels] -> f32 latent [channels, T, H, W].
  virtual void unpatchify(const PatchGrid& grid, Matrix x, int64_t channels, ChannelOrder order, float* latent) = 0;
  // x += factor * y over f32 vectors.
  virtual void axpy(float factor, const float* y, int64_t n, float* x) = 0;
  // out = the sum of factor * x over 1 to kMostTerms f32 vectors; out may be one of them.
  virtual void combine(std::span<const Term> terms, int64_t n, float* out) = 0;

  // Whether `linear` is timed from here on, each product by itself.
  virtual void time_linear(bool on) = 0;
  virtual LinearTimes take_linear_times() = 0;  // of the calls since the last taking; waits for them
  // Seconds of such a product with a bias by each algorithm that the engine's library proposes, that of `linear` first;
  // empty: it has no such library.
  virtual std::vector<double> time_algorithms(const LinearShape& shape) = 0;
};

inline Buffer uploaded(Engine& engine, const std::vector<float>& values) {
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(float));
  Buffer memory = engine.allocate(bytes);
  engine.upload(values.data(), memory.get(), bytes);
  return memory;
}

// The engine of the context's backend. compute: f32, or bf16: linear layers and attention multiply bf16 numbers and sum in
// f32; the rest is f32 always. A GPU's is bf16 whatever is asked for. Throws Status::unsupported for a linear mode that the
// backend or its GPU has not.
std::unique_ptr<Engine> make_engine(const Context& context, DType compute, LinearMode mode = LinearMode::plain);

// On the host, whatever the context's backend: then with as many threads of its own.
std::unique_ptr<Engine> make_cpu_engine(const Context& context, DType compute);
// Throws Status::unsupported in a build without CUDA or where cuBLASLt is not installed.
std::unique_ptr<Engine> make_cuda_engine(const Context& context, LinearMode mode = LinearMode::plain);

}  // namespace scope::video
