// Measures the calls of a dense generation, and keeps the higher densities where there is a profile already.
#include "run_profile.h"

#include "measure/recall.h"
#include "parse.h"
#include "terminal.h"

namespace scope::cli {

RunProfile::RunProfile(std::string path, const std::string& samples, const Settings& settings,
                       const video::ModelConfig& config, int64_t steps)
    : path_(std::move(path)),
      samples_(parse_samples(samples, "--profile-samples")),
      heads_(config.heads),
      head_dim_(config.head_dim) {
  require(settings.dense, Status::invalid_argument,
          "--profile-out: densities are those of a dense run; give --method dense");
  require(config.text_tokens == 0, Status::unsupported,
          "--profile-out: this model has text in its self-attention, which a profile does not measure");
  if (!io::exists(path_)) return;
  profile_ = read_profile(path_);
  check_profile(profile_, heads_, config.layers, 0);
  require(profile_.steps == steps, Status::shape, "profile: {} is of {} steps, the run has {}", path_, profile_.steps,
          steps);
}

void RunProfile::add(ThreadPool& pool, int64_t step, int64_t layer, DType dtype, const std::vector<std::byte>& q,
                     const std::vector<std::byte>& k) {
  const double start = now_seconds();
  const auto head = [&](const std::vector<std::byte>& x, int64_t h) {
    const int64_t row = heads_ * head_dim_ * dtype_bytes(dtype);
    return RowsView{x.data() + h * head_dim_ * dtype_bytes(dtype), dtype, std::ssize(x) / row, head_dim_,
                    heads_ * head_dim_};
  };
  for (int64_t h = 0; h < heads_; ++h) {
    raise_density(profile_, step, layer, h, exact_density(pool, head(q, h), head(k, h), kProfileMass, samples_));
  }
  seconds_ += now_seconds() - start;
}

nlohmann::ordered_json RunProfile::json() const {
  nlohmann::ordered_json out{{"path", path_}, {"mass", kProfileMass}, {"samples", samples_}, {"seconds", seconds_}};
  if (samples_ == parse_samples("all")) out["samples"] = "all";
  return out;
}

}  // namespace scope::cli
