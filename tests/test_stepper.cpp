// Tests the samplers: Euler's levels, and every step of UniPC against diffusers' scheduler.
#include <cmath>
#include <cstring>

#include "cases.h"
#include "io/safetensors.h"
#include "support.h"
#include "video/stepper.h"
#include "video/weights.h"

namespace scope::video {
namespace {

const std::string kCases = test::repository() + "/tests/data/unipc.safetensors";

std::vector<std::pair<std::shared_ptr<Context>, std::shared_ptr<Engine>>> engines() {
  if (test::testing_cuda()) {
    const auto context = std::make_shared<Context>(ContextOptions{.backend = "cuda"});
    return {{context, make_cuda_engine(*context)}};
  }
  const auto context = std::make_shared<Context>(2);
  return {{context, make_cpu_engine(*context, DType::f32)}, {context, make_cpu_engine(*context, DType::bf16)}};
}

class StepperSteps : public testing::Test {
 protected:
  void SetUp() override {
    if (test::testing_cuda() && !test::backend().present()) GTEST_SKIP() << "[GPU tests skipped]";
  }
};

std::vector<float> fetch(Engine& engine, const Buffer& memory, size_t numbers) {
  std::vector<float> out(numbers);
  engine.download(memory.get(), out.data(), std::ssize(out) * 4);
  return out;
}

float* floats(const Buffer& memory) { return static_cast<float*>(memory.get()); }

TEST_F(StepperSteps, AreThoseOfDiffusersUniPc) {
  const io::SafeTensors file = io::read_safetensors(kCases);
  const auto take = [&](const std::string& name) { return to_f32(file.tensors.at(name)); };
  for (const auto& [context, engine] : engines()) {
    for (const std::string name : {"one", "two", "three", "twenty", "fifty", "random"}) {
      const auto noise = take(name + ".noise"), velocities = take(name + ".velocities"), latents = take(name + ".latents"),
                 timesteps = take(name + ".timesteps");
      const double shift = take(name + ".shift")[0];
      const size_t steps = timesteps.size(), n = noise.size();
      const auto ours = noise_timesteps(Sampler::unipc, std::ssize(timesteps), shift);
      EXPECT_EQ(std::vector<float>(ours.begin(), ours.end()), timesteps) << name;
      Stepper stepper(*engine, Sampler::unipc, std::ssize(timesteps), shift, std::ssize(noise));
      const Buffer latent = uploaded(*engine, noise);
      double before = 0;  // rounding of the steps so far
      for (size_t i = 0; i < steps; ++i) {
        const Buffer velocity = uploaded(*engine, {velocities.begin() + std::ssize(noise) * static_cast<int64_t>(i),
                                                   velocities.begin() + std::ssize(noise) * static_cast<int64_t>(i + 1)});
        stepper.step(static_cast<int64_t>(i), floats(velocity), nullptr, 1, floats(latent));
        const auto got = fetch(*engine, latent, n);
        double largest = 0, error = 0;
        for (size_t k = 0; k < n; ++k) {
          largest = std::max(largest, std::abs(double{latents[i * n + k]}));
          error = std::max(error, std::abs(double{got[k]} - double{latents[i * n + k]}));
        }
        EXPECT_LT(error / largest, before + 2e-6) << name << ", step " << i << " of " << steps;
        before = error / largest;
      }
      EXPECT_LT(before, 2e-6) << name << ", the sample";
    }
  }
}

TEST(StepperOnCpu, TimestepsOfUniPcAreThoseOfDiffusers) {
  const io::SafeTensors file = io::read_safetensors(kCases);
  for (const int shift : {1, 3, 5, 7, 8, 12}) {
    const io::Array& stored = file.tensors.at(fmt::format("timesteps.{}", shift));
    size_t at = 0;
    for (int64_t steps = 1; steps <= 60; ++steps) {
      for (const double t : noise_timesteps(Sampler::unipc, steps, shift)) {
        int32_t expected = 0;
        std::memcpy(&expected, stored.data.data() + 4 * at++, 4);
        EXPECT_EQ(t, expected) << steps << " steps, shift " << shift;
      }
    }
    EXPECT_EQ(4 * at, stored.data.size());
  }
}

// Guidance is linear: a step by prompt and negative is one by their mixture.
TEST_F(StepperSteps, GuideByTheMixtureOfBothBranches) {
  for (const auto& [context, engine] : engines()) {
    for (const Sampler sampler : {Sampler::euler, Sampler::unipc}) {
      const std::vector<float> noise = {0.5f, -1, 2, 0.25f}, prompt = {1, -0.5f, 0.25f, 3}, negative = {-1, 0.5f, 2, 1};
      std::vector<float> mixture;
      for (size_t k = 0; k < 4; ++k) mixture.push_back(negative[k] + 4 * (prompt[k] - negative[k]));
      const Buffer a = uploaded(*engine, noise), b = uploaded(*engine, noise), p = uploaded(*engine, prompt),
                   m = uploaded(*engine, negative), mixed = uploaded(*engine, mixture);
      Stepper one(*engine, sampler, 3, 3, 4), other(*engine, sampler, 3, 3, 4);
      for (int64_t i = 0; i < 3; ++i) {
        one.step(i, floats(p), floats(m), 4, floats(a));
        other.step(i, floats(mixed), nullptr, 1, floats(b));
      }
      const auto got = fetch(*engine, a, 4), want = fetch(*engine, b, 4);
      for (size_t k = 0; k < 4; ++k) EXPECT_NEAR(got[k], want[k], 1e-5);
    }
  }
}

TEST(StepperOnCpu, LevelsOfEuler) {
  const auto levels = noise_levels(Sampler::euler, 20, 3);
  ASSERT_EQ(levels.size(), 21u);
  EXPECT_EQ(levels[0], 1);
  EXPECT_EQ(levels[20], 0);
  EXPECT_NEAR(levels[10], 0.75, 1e-12);
  for (size_t i = 0; i < 20; ++i) EXPECT_GT(levels[i], levels[i + 1]);
}

}  // namespace
}  // namespace scope::video
