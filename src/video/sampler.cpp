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

Sample generate(const OpenModel& open, const Request& request) {
  require(request.steps >= 1 && request.steps <= 10000, Status::invalid_argument, "steps: got {}, expected 1..10000",
          request.steps);
  require(request.shift > 0 && std::isfinite(request.shift), Status::invalid_argument, "shift: got {}, expected > 0",
          request.shift);
  for (const double guidance : {request.guidance, request.guidance_2}) {
    require(std::isfinite(guidance), Status::invalid_argument, "guidance: got {}, expected a number", guidance);
  }
  const std::vector<int64_t> experts = experts_of(request);
  const int64_t first_step = request.resume == nullptr ? 0 : request.resume->steps_done;
  require(first_step >= 0 && first_step < request.steps, Status::format, "resume: got {} steps done, expected 0..{}",
          first_step, request.steps - 1);
  const auto expert_at = [&](int64_t step) { return experts[static_cast<size_t>(step)]; };
  std::shared_ptr<const Model> model = open(expert_at(first_step));
  auto start = std::chrono::steady_clock::now();  // of the clock that stands still while weights are read
  const ModelConfig config = model->config();
  Engine& engine = model->engine();
  for (const int64_t n : request.grid) {
    require(n >= 1 && n <= config.rope_max, Status::shape, "grid: got {}, expected 1..{} tokens along each axis",
            io::join(request.grid, "x"), config.rope_max);
  }
  const auto size = latent_size(config, request.grid);
  check("noise", request.noise, config.latent_channels, size);
  check("condition", request.condition, config.condition_channels, size);
  if (!request.first_frame.empty()) check("first frame", request.first_frame, config.latent_channels, {1, size[1], size[2]});
  require(!config.needs_first_frame || !request.first_frame.empty(), Status::shape, "first frame: this model needs one");
  const auto branches_of = [&](int64_t expert) { return guidance_of(request, expert) == 1 ? 1 : 2; };
  const int64_t branches = std::max(branches_of(experts.front()), branches_of(experts.back()));
  std::unique_ptr<Pass> pass;
  const auto begin = [&](int64_t expert) {
    pass = model->start(request.grid, request.settings.method->morton);
    pass->add_prompt(request.prompt);
    if (branches_of(expert) == 2) pass->add_prompt(request.negative);
    if (!request.first_frame.empty()) pass->keep_first_frame();
    pass->set_timesteps(noise_timesteps(request.sampler, request.steps, request.shift));
  };
  begin(expert_at(first_step));
  SelfAttention attention(engine, config, request.settings, request.grid, branches);

  const auto bytes = static_cast<int64_t>(request.noise.size() * sizeof(float));
  const Buffer latent = engine.allocate(bytes);
  std::vector<Buffer> velocities;  // of each branch
  for (int64_t b = 0; b < branches; ++b) velocities.push_back(engine.allocate(bytes));
  const Buffer condition = engine.allocate(static_cast<int64_t>(request.condition.size() * sizeof(float)));
  engine.upload(request.noise.data(), latent.get(), bytes);
  engine.upload(request.condition.data(), condition.get(), static_cast<int64_t>(request.condition.size() * sizeof(float)));
  Stepper stepper(engine, request.sampler, request.steps, request.shift, std::ssize(request.noise));

  Sample sample;
  const auto fetch = [&](Matrix x, const TextTokens& text) {
    std::vector<std::byte> host(static_cast<size_t>((x.rows - text.padding) * x.columns * dtype_bytes(x.dtype)));
    engine.download(x.data, host.data(), std::ssize(host));
    return host;
  };
  const auto floats = [](const Buffer& memory) { return static_cast<float*>(memory.get()); };
  const auto fetch_latent = [&] {
    std::vector<float> host(request.noise.size());
    engine.download(latent.get(), host.data(), bytes);
    return host;
  };
  // A step moves the first frame too, which nothing else depends on.
  const auto restore_first_frame = [&] {
    const int64_t frame = size[1] * size[2];
    for (int64_t c = 0; !request.first_frame.empty() && c < config.latent_channels; ++c) {
      engine.upload(request.first_frame.data() + c * frame, floats(latent) + c * size[0] * frame,
                    frame * static_cast<int64_t>(sizeof(float)));
    }
  };
  restore_first_frame();
  if (const Snapshot* from = request.resume; from != nullptr) {
    require(from->latent.size() == request.noise.size(), Status::format, "latent: got {} numbers, expected {}",
            from->latent.size(), request.noise.size());
    engine.upload(from->latent.data(), latent.get(), bytes);
    stepper.load(from->history);
    if (first_step > 0 && expert_at(first_step) == expert_at(first_step - 1)) attention.load(from->states);
    sample.calls = from->calls;
    sample.seconds = from->seconds;
  }
  const auto seconds_now = [&start, before = sample.seconds] {
    return before + std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const auto take_reports = [&] {
    for (CallReport& report : attention.take_reports()) {
      sample.calls.push_back(std::move(report));
      if (request.done) request.done(sample.calls.back());
    }
  };
  for (int64_t step = first_step; step < request.steps; ++step) {
    const int64_t expert = expert_at(step);
    if (step > first_step && expert != expert_at(step - 1)) {
      engine.wait();  // before what it works on is freed, so that both are never in memory
      pass.reset();
      model.reset();
      const auto stop = std::chrono::steady_clock::now();
      model = open(expert);
      start += std::chrono::steady_clock::now() - stop;
      begin(expert);
      attention.forget();
    }
    for (int64_t branch = 0; branch < branches_of(expert); ++branch) {
      const auto attend = [&](int64_t layer, Matrix q, Matrix k, Matrix v, Matrix out, const TextTokens& text) {
        if (request.wanted && request.wanted(step, layer, branch)) {
          request.watch(step, layer, branch, q.dtype, fetch(q, text), fetch(k, text), fetch(v, text));
        }
        attention.run({layer, step, request.steps}, branch, q, k, v, out, text);
        if (engine.context.host()) take_reports();
      };
      pass->forward(step, branch, floats(latent), floats(condition), attend,
                    floats(velocities[static_cast<size_t>(branch)]));
    }
    stepper.step(step, floats(velocities[0]), branches_of(expert) == 1 ? nullptr : floats(velocities[1]),
                 guidance_of(request, expert), floats(latent));
    restore_first_frame();
    take_reports();  // of a device, which worked on without us
    const int64_t done = step + 1;
    if (request.snapshot_every == 0 || done % request.snapshot_every != 0 || done == request.steps) continue;
    request.snapshot({done, fetch_latent(), stepper.save(), attention.save(), sample.calls, seconds_now()});
  }
  sample.latent = fetch_latent();
  for (const float x : sample.latent) {
    require(std::isfinite(x), Status::non_finite,
            "the sample holds NaN or Inf: weights, noise or condition do too, or overflow");
  }
  sample.seconds = seconds_now();
  return sample;
}

}  // namespace scope::video
