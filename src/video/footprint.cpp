// Opens a model on an engine that only counts what it is asked for.
#include "video/footprint.h"

#include <algorithm>

#include "methods/methods.h"

namespace scope::video {

namespace {

class CountingEngine final : public Engine {
 public:
  explicit CountingEngine(const Engine& like) : Engine(like.context, like.activation, like.attention, like.linear_mode) {}

  Buffer allocate(int64_t bytes) override {
    counted += bytes;
    return nullptr;
  }
  void upload(const void*, void*, int64_t) override {}
  void download(const void*, void*, int64_t) override {}
  void wait() override {}
  MemoryUse memory() const override { return {counted, 0}; }
  std::unique_ptr<Weights> pack(const io::Array&, int64_t out, int64_t in) override { return count_weights(out, in); }
  std::unique_ptr<Weights> draw_weights(const RandomStream&, float, int64_t out, int64_t in) override {
    return count_weights(out, in);
  }
  void quantise(Weights& weights, const std::string&) override {
    if (linear_mode == LinearMode::plain || !fits_fp8(weights)) return;
    counted += 4 * weights.out - weights.out * weights.in * (dtype_bytes(attention) - 1);
    widest = std::max(widest, weights.in);
  }
  void draw(const RandomStream&, float, float, Matrix) override {}
  void linear(const Linear&, Matrix, Matrix, Activation) override {}
  void layer_norm(Matrix, const float*, const float*, float, Matrix) override {}
  void rms_norm(Matrix, const float*, float, const float*, int64_t, Matrix) override {}
  void head_norm(Matrix, const float*, float, const float*, int64_t, Matrix) override {}
  void convert(Matrix, Matrix) override {}
  void add(Matrix, Matrix, const float*) override {}
  void modulation(const float*, const float*, int64_t, int64_t, uint32_t, float*) override {}
  void patchify(const PatchGrid&, const float*, int64_t, const float*, int64_t, Matrix) override {}
  void unpatchify(const PatchGrid&, Matrix, int64_t, ChannelOrder, float*) override {}
  void axpy(float, const float*, int64_t, float*) override {}
  void combine(std::span<const Term>, int64_t, float*) override {}
  void time_linear(bool) override {}
  LinearTimes take_linear_times() override { return {}; }
  std::vector<double> time_algorithms(const LinearShape&) override { return {}; }

  int64_t counted = 0;
  int64_t widest = 0;  // inputs of a layer in 8 bits

 private:
  std::unique_ptr<Weights> count_weights(int64_t out, int64_t in) {
    counted += out * in * dtype_bytes(attention);  // linear layers multiply the same type
    auto weights = std::make_unique<Weights>();
    weights->in = in;
    weights->out = out;
    return weights;
  }
};

}  // namespace

int64_t model_bytes(std::string_view config, const Engine& like, const std::array<int64_t, 3>& grid, bool morton) {
  CountingEngine engine(like);
  // A device's engine leaves what the host keeps to the host, which has room for it.
  const auto drawn = [&](const TensorList& list, Engine& counting, Engine&) {
    CountingEngine host(like);
    return drawn_tensors(0)(list, counting, like.context.host() ? counting : host);
  };
  make_model(config, drawn, engine)->start(grid, morton);
  const int64_t rounded = engine.widest == 0 ? 0 : engine.widest + 4;  // bytes of a token's activations in 8 bits
  return engine.counted + parse_model_config(config).tokens(grid) * rounded;
}

int64_t two_experts_bytes(const Folder& folder, const Request& request, const Engine& like) {
  const std::string& expert = folder.transformers[0];  // the other has the same shape
  const int64_t model = model_bytes(read_text(expert + "/config.json"), like, request.grid, request.settings.method->morton);
  const int64_t branches = request.guidance == 1 && request.guidance_2 == 1 ? 1 : 2;
  return 2 * model + SelfAttention::bytes(like, read_model_config(expert), request.settings, request.grid, branches);
}

}  // namespace scope::video
