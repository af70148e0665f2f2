// Euler's step, and UniPC (Zhao et al.) of order 2 with B(h) = e^h - 1 over predictions of the data.
#include "video/stepper.h"

#include <algorithm>
#include <cmath>

namespace scope::video {

namespace {

double shifted(double u, double shift) { return shift * u / (1.0 + (shift - 1.0) * u); }

// Before the rounding to f32.
std::vector<double> unipc_levels(int64_t steps, double shift) {
  const double step = (1.0 / 1000.0 - 1.0) / static_cast<double>(steps);
  std::vector<double> levels;
  for (int64_t i = 0; i < steps; ++i) levels.push_back(shifted(static_cast<double>(i) * step + 1.0, shift));
  levels[0] -= 1e-6;  // at 1 there would be no data in the latent, and its logarithm infinite
  return levels;
}

// Half the logarithm of signal over noise, in powers.
double log_ratio(double level) { return std::log(1.0 - level) - std::log(level); }

// From one level to another: x_to = scale x_from - signal (e^-h - 1) (data + corrections).
struct Way {
  double h, scale, weight;  // weight: -signal (e^-h - 1)
  Way(double from, double to) : h(log_ratio(to) - log_ratio(from)), scale(to / from), weight(-(1.0 - to) * std::expm1(-h)) {}
};

}  // namespace

std::vector<double> noise_levels(Sampler sampler, int64_t steps, double shift) {
  std::vector<double> levels;
  if (sampler == Sampler::unipc) {
    for (const double level : unipc_levels(steps, shift)) levels.push_back(static_cast<float>(level));
    levels.push_back(0);
    return levels;
  }
  for (int64_t i = 0; i <= steps; ++i) {
    levels.push_back(shifted(1.0 - static_cast<double>(i) / static_cast<double>(steps), shift));
  }
  return levels;
}

std::vector<double> noise_timesteps(Sampler sampler, int64_t steps, double shift) {
  const bool whole = sampler == Sampler::unipc;
  std::vector<double> timesteps = whole ? unipc_levels(steps, shift) : noise_levels(sampler, steps, shift);
  timesteps.resize(static_cast<size_t>(steps));
  for (double& t : timesteps) t = whole ? std::floor(t * 1000) : t * 1000;
  return timesteps;
}

Stepper::Stepper(Engine& engine, Sampler sampler, int64_t steps, double shift, int64_t numbers)
    : engine_(engine), sampler_(sampler), steps_(steps), numbers_(numbers), levels_(noise_levels(sampler, steps, shift)) {
  // Zeros, since all of it is saved, also what no step has filled yet.
  const std::vector<float> zeros(static_cast<size_t>(sampler == Sampler::unipc ? numbers : 0));
  for (int i = 0; sampler == Sampler::unipc && i < 4; ++i) memory_.push_back(uploaded(engine, zeros));
}

void Stepper::step(int64_t i, const float* prompt, const float* negative, double guidance, float* latent) {
  const double level = levels_[static_cast<size_t>(i)], next = levels_[static_cast<size_t>(i) + 1];
  const double share = negative == nullptr ? 1.0 : guidance;
  if (sampler_ == Sampler::euler) {
    engine_.axpy(static_cast<float>((next - level) * share), prompt, numbers_, latent);
    if (negative != nullptr) {
      engine_.axpy(static_cast<float>((next - level) * (1.0 - share)), negative, numbers_, latent);
    }
    return;
  }
  std::vector<Term> data_terms = {{1.0f, latent}, {static_cast<float>(-level * share), prompt}};
  if (negative != nullptr) data_terms.push_back({static_cast<float>(-level * (1.0 - share)), negative});
  engine_.combine(data_terms, numbers_, data(i));
  unipc(i, latent);
}

std::vector<std::vector<float>> Stepper::save() const {
  std::vector<std::vector<float>> saved;
  for (const Buffer& memory : memory_) {
    saved.emplace_back(static_cast<size_t>(numbers_));
    engine_.download(memory.get(), saved.back().data(), numbers_ * 4);
  }
  return saved;
}

void Stepper::load(const std::vector<std::vector<float>>& saved) {
  require(saved.size() == memory_.size(), Status::format, "the sampler's history: got {} vectors, expected {}", saved.size(),
          memory_.size());
  for (size_t i = 0; i < saved.size(); ++i) {
    require(std::ssize(saved[i]) == numbers_, Status::format, "the sampler's history: got {} numbers, expected {}",
            saved[i].size(), numbers_);
    engine_.upload(saved[i].data(), memory_[i].get(), numbers_ * 4);
  }
}

// The corrector improves the latent at level i by what was predicted there; the predictor goes on from it. Both are of order
// 2 where there are two earlier predictions, the predictor of the last step of order 1.
void Stepper::unipc(int64_t i, float* latent) {
  const auto level = [&](int64_t at) { return levels_[static_cast<size_t>(at)]; };
  const auto order = [&](int64_t at) { return std::min({int64_t{2}, at + 1, steps_ - at}); };
  const auto term = [](double factor, const float* x) { return Term{static_cast<float>(factor), x}; };
  auto* corrected = static_cast<float*>(memory_[0].get());
  if (i == 0) {
    engine_.combine(std::vector{term(1, latent)}, numbers_, corrected);
  } else {
    const Way way(level(i - 1), level(i));
    double older = 0, here = 0.5;  // shares of the differences from data(i - 1)
    if (order(i - 1) == 2) {
      const double ratio = (log_ratio(level(i - 2)) - log_ratio(level(i - 1))) / way.h, b = std::expm1(-way.h);
      const double phi_1 = -b / way.h - 1, phi_2 = -phi_1 / way.h - 0.5, first = phi_1 / b, second = 2 * phi_2 / b;
      const double solved = (first - second) / (1 - ratio);
      older = solved / ratio;
      here = first - solved;
    }
    std::vector<Term> terms = {term(way.scale, corrected), term(way.weight * (1 - older - here), data(i - 1)),
                               term(way.weight * here, data(i))};
    if (older != 0) terms.push_back(term(way.weight * older, data(i - 2)));
    engine_.combine(terms, numbers_, corrected);
  }
  const Way way(level(i), level(i + 1));
  double older = 0;
  if (order(i) == 2) older = 0.5 * way.h / (log_ratio(level(i - 1)) - log_ratio(level(i)));
  std::vector<Term> terms = {term(way.scale, corrected), term(way.weight * (1 - older), data(i))};
  if (older != 0) terms.push_back(term(way.weight * older, data(i - 1)));
  engine_.combine(terms, numbers_, latent);
}

}  // namespace scope::video
