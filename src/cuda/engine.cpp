// The video engine on a GPU: cuBLASLt for linear layers, our kernels between them, all on one stream.
#include "video/engine.h"

#include <cuda_runtime_api.h>

#include <cmath>

#include "core/numeric.h"
#include "cuda/cublaslt.h"
#include "cuda/device.h"
#include "cuda/errors.h"
#include "cuda/memory.h"
#include "cuda/video.h"
#include "video/weights.h"

namespace scope::video {

namespace {

using cuda::check;

constexpr int kFirstWithFp8 = 89;

struct DeviceWeights : Weights {
  Buffer memory;        // bf16 [out, depth], or e4m3 [out, in] where there are scales
  Buffer scales;        // f32 [out]
  int64_t depth = 0;    // inputs, with zeros up to a multiple of 8
  mutable Buffer bias;  // bf16 [out]: a copy of `bias_of`, made at the layer's first use
  mutable const float* bias_of = nullptr;
};

class CudaEngine : public Engine {
 public:
  // The engine's device stays current on this thread: its owner works on no other one.
  CudaEngine(const Context& on, LinearMode mode) : Engine(on, DType::bf16, DType::bf16, mode) {
    const cuda::Device& device = *on.exec().device;
    require(mode == LinearMode::plain || 10 * device.major + device.minor >= kFirstWithFp8, Status::unsupported,
            "fp8 linear layers: {} is sm_{}{} and has no fp8; expected sm_{} or later", device.name, device.major,
            device.minor, kFirstWithFp8);
    check(cudaSetDevice(on.exec().device->index), "cudaSetDevice");
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    stream = stream_;
    products_ = std::make_unique<cuda::CublasLt>();
  }
  ~CudaEngine() override {
    cudaStreamSynchronize(stream_);
    products_.reset();
    cudaStreamDestroy(stream_);
  }

  Buffer allocate(int64_t bytes) override { return Buffer(cuda::allocate(bytes), cuda::release); }
  void upload(const void* host, void* to, int64_t bytes) override {
    check(cudaMemcpyAsync(to, host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream_), "upload");
    wait();
  }
  void download(const void* from, void* host, int64_t bytes) override {
    check(cudaMemcpyAsync(host, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream_), "download");
    wait();
  }
  void wait() override { check(cudaStreamSynchronize(stream_), "the device"); }
  MemoryUse memory() const override {
    size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return {static_cast<int64_t>(total - free), static_cast<int64_t>(free)};
  }

  std::unique_ptr<Weights> pack(const io::Array& matrix, int64_t out, int64_t in) override {
    auto packed = make_weights(out, in);
    const std::vector<float> values = to_f32(matrix);
    std::vector<uint16_t> bits(static_cast<size_t>(out * packed->depth));
    for (int64_t i = 0; i < out * in; ++i) {
      bits[static_cast<size_t>(i / in * packed->depth + i % in)] = f32_to_bf16(values[static_cast<size_t>(i)]);
    }
    upload(bits.data(), packed->memory.get(), 2 * std::ssize(bits));
    return packed;
  }

  std::unique_ptr<Weights> draw_weights(const RandomStream& from, float deviation, int64_t out, int64_t in) override {
    auto drawn = make_weights(out, in);
    if (drawn->depth > in) {
      check(cudaMemsetAsync(drawn->memory.get(), 0, static_cast<size_t>(2 * out * drawn->depth), stream_), "memset");
    }
    cuda::draw(stream_, from, 0, deviation, in, {drawn->memory.get(), DType::bf16, out, drawn->depth});
    return drawn;
  }
  void draw(const RandomStream& from, float mean, float deviation, Matrix x) override {
    cuda::draw(stream_, from, mean, deviation, x.columns, x);
  }

  void quantise(Weights& plain, const std::string& name) override {
    if (linear_mode == LinearMode::plain) return;
    auto& weights = static_cast<DeviceWeights&>(plain);
    if (!fits_fp8(weights)) {
      ++not_quantised[{weights.in, weights.out}];
      return;
    }
    const Buffer bytes = allocate(weights.out * weights.in), scales = allocate(4 * weights.out);
    cuda::quantise_rows(stream_, {weights.memory.get(), DType::bf16, weights.out, weights.in},
                        static_cast<uint8_t*>(bytes.get()), static_cast<float*>(scales.get()));
    std::vector<float> found(static_cast<size_t>(weights.out));
    download(scales.get(), found.data(), 4 * weights.out);  // and waits: the bf16 copy goes
    for (size_t row = 0; row < found.size(); ++row) {
      require(std::isfinite(found[row]), Status::non_finite,
              "tensor '{}': row {} holds NaN, Inf or what is Inf in bf16, and fp8 has no scale for it", name, row);
    }
    weights.memory = bytes;
    weights.scales = scales;
  }

  void linear(const Linear& layer, Matrix x, Matrix out, Activation then) override {
    const auto& weights = static_cast<const DeviceWeights&>(*layer.weights);
    const bool fp8 = weights.scales != nullptr;
    if (timing_ && fp8) mark();  // what activations cost is part of such a layer
    cuda::ProductArrays at{weights.memory.get(), x.data, nullptr, out.data};
    if (fp8) {
      at = with_rounded(at, x);
      at.weight_scales = static_cast<const float*>(weights.scales.get());
    } else if (x.dtype == DType::f32 || x.columns != weights.depth) {  // a few embeddings, or patches of an unusual model
      const Matrix rounded{scratch(x.rows * weights.depth * 2), DType::bf16, x.rows, weights.depth};
      cuda::convert(stream_, x, rounded);
      at.x = rounded.data;
    }
    at.bias = bias_for(layer, weights, fp8 ? DType::bf16 : out.dtype);
    cuda::Product product{
        x.rows, weights.out, weights.depth, out.dtype, at.bias != nullptr, then == Activation::gelu_tanh, operands(fp8)};
    // In fp8 the library may have no gelu: then its input is rounded to `out` first, as other activations' is.
    if (product.gelu && fp8 && !products_->has(product, at)) product.gelu = false;
    const bool fused = product.gelu;
    if (timing_ && !fp8) mark();
    products_->multiply(stream_, product, at);
    if (timing_) {
      mark();
      timed_.push_back({x.rows, weights.out, weights.in, out.dtype, fp8});
    }
    if (then != Activation::none && !fused) cuda::activate(stream_, out, then);
  }

  void layer_norm(Matrix x, const float* scale, const float* shift, float eps, Matrix out) override {
    cuda::layer_norm(stream_, x, scale, shift, eps, out);
  }
  void add_norm(Matrix x, Matrix y, const float* gate, const float* scale, const float* shift, float eps,
                Matrix out) override {
    cuda::add_norm(stream_, x, y, gate, scale, shift, eps, out);
  }
  void rms_norm(Matrix x, const float* weight, float eps, const float* rotation, int64_t head_dim, Matrix out) override {
    cuda::rms_norm(stream_, x, weight, eps, rotation, head_dim, out);
  }
  void head_norm(Matrix x, const float* weight, float eps, const float* rotation, int64_t head_dim, Matrix out) override {
    cuda::head_norm(stream_, x, weight, eps, rotation, head_dim, out);
  }
  void convert(Matrix x, Matrix out) override { cuda::convert(stream_, x, out); }
  void add(Matrix x, Matrix y, const float* gate) override { cuda::add(stream_, x, y, gate); }
  void modulation(const float* table, const float* time, int64_t rows, int64_t columns, uint32_t plus_one,
                  float* out) override {
    cuda::modulation(stream_, table, time, rows, columns, plus_one, out);
  }
  void patchify(const PatchGrid& grid, const float* latent, int64_t channels, const float* more, int64_t more_channels,
                Matrix out) override {
    cuda::patchify(stream_, grid, latent, channels, more, more_channels, out);
  }
  void unpatchify(const PatchGrid& grid, Matrix x, int64_t channels, ChannelOrder order, float* latent) override {
    cuda::unpatchify(stream_, grid, x, channels, order, latent);
  }
  void axpy(float factor, const float* y, int64_t n, float* x) override { cuda::axpy(stream_, factor, y, n, x); }
  void combine(std::span<const Term> terms, int64_t n, float* out) override { cuda::combine(stream_, terms, n, out); }

  void time_linear(bool on) override { timing_ = on; }
  LinearTimes take_linear_times() override {
    wait();
    LinearTimes times;
    for (size_t i = 0; i < timed_.size(); ++i) {
      float milliseconds = 0;
      check(cudaEventElapsedTime(&milliseconds, events_[2 * i].get(), events_[2 * i + 1].get()), "cudaEventElapsedTime");
      LinearTime& time = times[timed_[i]];
      ++time.calls;
      time.seconds += static_cast<double>(milliseconds) / 1e3;
    }
    timed_.clear();
    marks_ = 0;
    return times;
  }
  std::vector<double> time_algorithms(const LinearShape& shape) override {
    const int64_t depth = round_up(shape.in, 8);
    const auto drawn = [&](uint32_t tensor, DType type, int64_t rows, int64_t columns) {  // zeros would take less power
      Buffer memory = allocate(rows * columns * dtype_bytes(type));
      draw({.tensor = tensor, .purpose = 5}, 0, 1, {memory.get(), type, rows, columns});
      return memory;
    };
    Buffer x = drawn(0, DType::bf16, shape.rows, depth), weights = drawn(1, DType::bf16, shape.out, depth), x_scales,
           weight_scales;
    const auto round = [&](Buffer& matrix, int64_t rows, Buffer& scales) {
      const Buffer bytes = allocate(rows * depth);
      scales = allocate(4 * rows);
      cuda::quantise_rows(stream_, {matrix.get(), DType::bf16, rows, depth}, static_cast<uint8_t*>(bytes.get()),
                          static_cast<float*>(scales.get()));
      wait();
      matrix = bytes;
    };
    if (shape.fp8) {
      round(x, shape.rows, x_scales);
      round(weights, shape.out, weight_scales);
    }
    const Buffer bias = drawn(2, shape.fp8 ? DType::bf16 : shape.type, 1, shape.out),
                 out = allocate(shape.rows * shape.out * dtype_bytes(shape.type));
    return products_->time_algorithms(
        stream_, {shape.rows, shape.out, depth, shape.type, true, false, operands(shape.fp8)},
        {weights.get(), x.get(), bias.get(), out.get(), static_cast<const float*>(weight_scales.get()),
         static_cast<const float*>(x_scales.get())});
  }

 private:
  struct DestroyEvent {
    void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
  };

  std::unique_ptr<DeviceWeights> make_weights(int64_t out, int64_t in) {
    require(out % 8 == 0, Status::unsupported, "a linear layer to {} channels: on a GPU it must be a multiple of 8", out);
    auto made = std::make_unique<DeviceWeights>();
    made->in = in;
    made->out = out;
    made->depth = round_up(in, 8);
    made->memory = allocate(2 * out * made->depth);
    return made;
  }

  cuda::Operands operands(bool fp8) const {
    return !fp8                                  ? cuda::Operands::bf16
           : linear_mode == LinearMode::fp8_fast ? cuda::Operands::e4m3_fast
                                                 : cuda::Operands::e4m3;
  }

  // The arrays with x as e4m3 and a scale for each row.
  cuda::ProductArrays with_rounded(cuda::ProductArrays at, Matrix x) {
    const int64_t bytes = x.rows * x.columns;  // a multiple of 16
    auto* memory = static_cast<uint8_t*>(scratch(bytes + 4 * x.rows));
    auto* scales = reinterpret_cast<float*>(memory + bytes);
    cuda::quantise_rows(stream_, x, memory, scales);
    at.x = memory;
    at.x_scales = scales;
    return at;
  }

  // The next event, here and now on the stream.
  void mark() {
    if (marks_ == events_.size()) {
      cudaEvent_t event = nullptr;
      check(cudaEventCreate(&event), "cudaEventCreate");
      events_.emplace_back(event);
    }
    check(cudaEventRecord(events_[marks_++].get(), stream_), "cudaEventRecord");
  }

  void* scratch(int64_t bytes) {
    if (bytes > scratch_bytes_) {
      wait();  // the old one may be in use
      scratch_ = allocate(bytes);
      scratch_bytes_ = bytes;
    }
    return scratch_.get();
  }

  // cuBLASLt takes a bias in the type of its output.
  const void* bias_for(const Linear& layer, const DeviceWeights& weights, DType type) {
    if (layer.bias == nullptr || type == DType::f32) return layer.bias;
    if (weights.bias_of != layer.bias) {
      weights.bias = allocate(2 * weights.out);
      weights.bias_of = layer.bias;
      cuda::convert(stream_, {const_cast<float*>(layer.bias), DType::f32, 1, weights.out},
                    {weights.bias.get(), DType::bf16, 1, weights.out});
    }
    return weights.bias.get();
  }

  cudaStream_t stream_ = nullptr;
  std::unique_ptr<cuda::CublasLt> products_;
  Buffer scratch_;
  int64_t scratch_bytes_ = 0;
  bool timing_ = false;
  std::vector<LinearShape> timed_;                                 // products, each between two events
  std::vector<std::unique_ptr<CUevent_st, DestroyEvent>> events_;  // kept for the next timing
  size_t marks_ = 0;                                               // events that are in use
};

}  // namespace

std::unique_ptr<Engine> make_cuda_engine(const Context& context, LinearMode mode) {
  return std::make_unique<CudaEngine>(context, mode);
}

}  // namespace scope::video
