// The steps of a generation.
#include "video/sampler.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numbers>

#include "core/numeric.h"
#include "core/random.h"
#include "methods/methods.h"

namespace scope::video {

namespace {

void check(const char* name, const std::vector<float>& x, int64_t channels, const std::array<int64_t, 3>& size) {
  const int64_t expected = channels * size[0] * size[1] * size[2];
  require(static_cast<int64_t>(x.size()) == expected, Status::shape, "{}: got {} numbers, expected [{}, {}, {}, {}]", name,
          x.size(), channels, size[0], size[1], size[2]);
}

}  // namespace

std::vector<float> make_noise(uint64_t seed, int64_t count) {
  const RandomStream stream{.seed = seed, .purpose = 4};
  const auto uniform = [&](uint64_t i) { return (static_cast<double>(stream.bits(i) >> 11) + 0.5) * 0x1p-53; };
  std::vector<float> noise(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t pair = static_cast<uint64_t>(i) / 2;
    const double radius = std::sqrt(-2.0 * std::log(uniform(2 * pair)));
    const double angle = 2.0 * std::numbers::pi * uniform(2 * pair + 1);
    noise[static_cast<size_t>(i)] = static_cast<float>(radius * (i % 2 == 0 ? std::cos(angle) : std::sin(angle)));
  }
  return noise;
}

std::array<int64_t, 3> latent_size(const ModelConfig& config, const std::array<int64_t, 3>& grid) {
  return {grid[0] * config.patch[0], grid[1] * config.patch[1], grid[2] * config.patch[2]};
}

std::vector<int64_t> experts_of(const Request& request) {
  std::vector<int64_t> experts;
  for (const double t : noise_timesteps(request.sampler, request.steps, request.shift)) {
    experts.push_back(t < request.boundary ? 1 : 0);
  }
  return experts;
}

Sample generate(const Model& model, const Request& request) {
  return generate([&](int64_t) { return std::shared_ptr<const Model>(std::shared_ptr<void>(), &model); }, request);
}

namespace {

const Request& checked(const Request& request) {
  require(request.steps >= 1 && request.steps <= 10000, Status::invalid_argument, "steps: got {}, expected 1..10000",
          request.steps);
  require(request.shift > 0 && std::isfinite(request.shift), Status::invalid_argument, "shift: got {}, expected > 0",
          request.shift);
  for (const double guidance : {request.guidance, request.guidance_2}) {
    require(std::isfinite(guidance), Status::invalid_argument, "guidance: got {}, expected a number", guidance);
  }
  return request;
}

int64_t first_step_of(const Request& request) {
  const int64_t first = request.resume == nullptr ? 0 : request.resume->steps_done;
  require(first >= 0 && first < request.steps, Status::format, "resume: got {} steps done, expected 0..{}", first,
          request.steps - 1);
  return first;
}

// The latents' size; what the model is given must have it.
std::array<int64_t, 3> checked_size(const Request& request, const ModelConfig& config) {
  for (const int64_t n : request.grid) {
    require(n >= 1 && n <= config.rope_max, Status::shape, "grid: got {}, expected 1..{} tokens along each axis",
            io::join(request.grid, "x"), config.rope_max);
  }
  const auto size = latent_size(config, request.grid);
  check("noise", request.noise, config.latent_channels, size);
  check("condition", request.condition, config.condition_channels, size);
  if (!request.first_frame.empty()) check("first frame", request.first_frame, config.latent_channels, {1, size[1], size[2]});
  require(!config.needs_first_frame || !request.first_frame.empty(), Status::shape, "first frame: this model needs one");
  return size;
}

int64_t bytes_of(const std::vector<float>& x) { return static_cast<int64_t>(x.size() * sizeof(float)); }
float* floats(const Buffer& memory) { return static_cast<float*>(memory.get()); }

class Generation {
 public:
  Generation(const OpenModel& open, const Request& request)
      : open_(open),
        request_(checked(request)),
        experts_(experts_of(request)),
        first_step_(first_step_of(request)),
        model_(open(expert_at(first_step_))),
        start_(Clock::now()),
        config_(model_->config()),
        engine_(model_->engine()),
        size_(checked_size(request, config_)),
        pass_(start_pass(expert_at(first_step_))),
        attention_(engine_, config_, request.settings, request.grid, most_branches()),
        latent_(engine_.allocate(bytes_of(request.noise))),
        velocities_(allocate_velocities()),
        condition_(engine_.allocate(bytes_of(request.condition))),
        stepper_(engine_, request.sampler, request.steps, request.shift, std::ssize(request.noise)) {
    engine_.upload(request.noise.data(), latent_.get(), bytes_of(request.noise));
    engine_.upload(request.condition.data(), condition_.get(), bytes_of(request.condition));
    restore_first_frame();
    if (request.resume != nullptr) resume(*request.resume);
  }

  Sample run() {
    for (int64_t step = first_step_; step < request_.steps; ++step) {
      const int64_t expert = expert_at(step);
      if (step > first_step_ && expert != expert_at(step - 1)) change_expert(expert);
      for (int64_t branch = 0; branch < branches_of(expert); ++branch) forward(step, branch);
      stepper_.step(step, floats(velocities_[0]), branches_of(expert) == 1 ? nullptr : floats(velocities_[1]),
                    guidance_of(request_, expert), floats(latent_));
      restore_first_frame();
      take_reports();  // of a device, which worked on without us
      const int64_t done = step + 1;
      if (request_.snapshot_every == 0 || done % request_.snapshot_every != 0 || done == request_.steps) continue;
      request_.snapshot({done, fetch_latent(), stepper_.save(), attention_.save(), sample_.calls, seconds()});
    }
    sample_.latent = fetch_latent();
    for (const float x : sample_.latent) {
      require(std::isfinite(x), Status::non_finite,
              "the sample holds NaN or Inf: weights, noise or condition do too, or overflow");
    }
    sample_.seconds = seconds();
    return std::move(sample_);
  }

 private:
  using Clock = std::chrono::steady_clock;

  int64_t expert_at(int64_t step) const { return experts_[static_cast<size_t>(step)]; }
  int64_t branches_of(int64_t expert) const { return guidance_of(request_, expert) == 1 ? 1 : 2; }
  int64_t most_branches() const { return std::max(branches_of(experts_.front()), branches_of(experts_.back())); }

  std::unique_ptr<Pass> start_pass(int64_t expert) const {
    auto pass = model_->start(request_.grid, request_.settings.method->morton);
    pass->add_prompt(request_.prompt);
    if (branches_of(expert) == 2) pass->add_prompt(request_.negative);
    if (!request_.first_frame.empty()) pass->keep_first_frame();
    pass->set_timesteps(noise_timesteps(request_.sampler, request_.steps, request_.shift));
    return pass;
  }

  std::vector<Buffer> allocate_velocities() const {
    std::vector<Buffer> velocities;
    for (int64_t b = 0; b < most_branches(); ++b) velocities.push_back(engine_.allocate(bytes_of(request_.noise)));
    return velocities;
  }

  void change_expert(int64_t expert) {
    engine_.wait();  // before what it works on is freed, so that both are never in memory
    pass_.reset();
    model_.reset();
    const auto stop = Clock::now();
    model_ = open_(expert);
    start_ += Clock::now() - stop;
    pass_ = start_pass(expert);
    attention_.forget();
  }

  void resume(const Snapshot& from) {
    require(from.latent.size() == request_.noise.size(), Status::format, "latent: got {} numbers, expected {}",
            from.latent.size(), request_.noise.size());
    engine_.upload(from.latent.data(), latent_.get(), bytes_of(request_.noise));
    stepper_.load(from.history);
    if (first_step_ > 0 && expert_at(first_step_) == expert_at(first_step_ - 1)) attention_.load(from.states);
    sample_.calls = from.calls;
    seconds_before_ = from.seconds;
  }

  void forward(int64_t step, int64_t branch) {
    const auto attend = [&](int64_t layer, Matrix q, Matrix k, Matrix v, Matrix out, const TextTokens& text) {
      if (request_.wanted && request_.wanted(step, layer, branch)) {
        request_.watch(step, layer, branch, q.dtype, fetch(q, text), fetch(k, text), fetch(v, text));
      }
      attention_.run({layer, step, request_.steps}, branch, q, k, v, out, text);
      if (engine_.context.host()) take_reports();
    };
    pass_->forward(step, branch, floats(latent_), floats(condition_), attend,
                   floats(velocities_[static_cast<size_t>(branch)]));
  }

  // A step moves the first frame too, which nothing else depends on.
  void restore_first_frame() {
    const int64_t frame = size_[1] * size_[2];
    for (int64_t c = 0; !request_.first_frame.empty() && c < config_.latent_channels; ++c) {
      engine_.upload(request_.first_frame.data() + c * frame, floats(latent_) + c * size_[0] * frame,
                     frame * static_cast<int64_t>(sizeof(float)));
    }
  }

  void take_reports() {
    for (CallReport& report : attention_.take_reports()) {
      sample_.calls.push_back(std::move(report));
      if (request_.done) request_.done(sample_.calls.back());
    }
  }

  std::vector<std::byte> fetch(Matrix x, const TextTokens& text) const {
    std::vector<std::byte> host(static_cast<size_t>((x.rows - text.padding) * x.columns * dtype_bytes(x.dtype)));
    engine_.download(x.data, host.data(), std::ssize(host));
    return host;
  }
  std::vector<float> fetch_latent() const {
    std::vector<float> host(request_.noise.size());
    engine_.download(latent_.get(), host.data(), bytes_of(host));
    return host;
  }

  double seconds() const { return seconds_before_ + std::chrono::duration<double>(Clock::now() - start_).count(); }

  const OpenModel& open_;
  const Request& request_;
  const std::vector<int64_t> experts_;  // of each step
  const int64_t first_step_;
  std::shared_ptr<const Model> model_;
  Clock::time_point start_;  // of the clock that stands still while weights are read
  double seconds_before_ = 0;
  const ModelConfig config_;
  Engine& engine_;
  const std::array<int64_t, 3> size_;
  std::unique_ptr<Pass> pass_;
  SelfAttention attention_;
  const Buffer latent_;
  const std::vector<Buffer> velocities_;  // of each branch
  const Buffer condition_;
  Stepper stepper_;
  Sample sample_;
};

}  // namespace

Sample generate(const OpenModel& open, const Request& request) { return Generation(open, request).run(); }

}  // namespace scope::video
