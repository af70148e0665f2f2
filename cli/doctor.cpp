// scope doctor: what this machine is, what this build can do on it, and a one-second self-test.
#include <fmt/format.h>

#include <cmath>
#include <cstring>

#include "common.h"
#include "core/numeric.h"
#include "cpu/kernels.h"
#include "cuda/device.h"
#include "measure/synthetic.h"
#include "methods/methods.h"

namespace scope::cli {

namespace {

// A sparse call that keeps every key must equal dense attention, and a selective one must keep what it was asked to.
void self_test(const Context& context) {
  const SyntheticSpec spec{{4, 12, 16}, {44, 42, 42}, 2, 7};
  const bool gpu = context.device() != nullptr;
  const Qkv qkv = synthetic_qkv(spec, gpu ? "bf16" : "f32", *context.exec().pool);
  CallArgs args;
  args.q = qkv.view(qkv.q, qkv.q_tokens);
  args.k = qkv.view(qkv.k, qkv.k_tokens);
  args.v = qkv.view(qkv.v, qkv.k_tokens);
  const auto attend = [&](const char* method, std::initializer_list<std::pair<const char*, const char*>> set) {
    Settings settings = find_method(method).settings();
    for (const auto& [name, value] : set) set_setting(settings, name, value);
    auto runner = std::make_unique<Runner>(context, settings,
                                           Shape{.batch = 1,
                                                 .heads = qkv.heads,
                                                 .q_tokens = qkv.q_tokens,
                                                 .k_tokens = qkv.k_tokens,
                                                 .dim = qkv.dim,
                                                 .dtype = qkv.dtype,
                                                 .rope = spec.rope,
                                                 .subspaces = {}});
    if (!settings.dense) runner->want_selection();
    runner->run(args);
    return runner;
  };
  const auto dense = attend("dense", {}), whole = attend("scope", {{"rho", "1"}});
  const auto sparse = attend("scope", {{"rule", "target"}, {"density", "0.2"}});
  double largest = 0;
  const auto value = [&](const Runner& runner, size_t i) -> double {
    if (gpu) {
      uint16_t bits = 0;
      std::memcpy(&bits, &runner.out[2 * i], 2);
      return bf16_to_f32(bits);
    }
    float x = 0;
    std::memcpy(&x, &runner.out[4 * i], 4);
    return x;
  };
  for (size_t i = 0; i < dense->out.size() / (gpu ? 2 : 4); ++i) {
    largest = std::max(largest, std::abs(value(*dense, i) - value(*whole, i)));
  }
  const Quality quality = measure(context, qkv, *sparse, false, 64);
  require(largest < (gpu ? 0.05 : 1e-4), Status::internal, "self-test: rho = 1 differs from dense by {}", largest);
  require(std::abs(sparse->stats.density - 0.2) < 0.01, Status::internal, "self-test: asked for density 0.2, got {}",
          sparse->stats.density);
  require(quality.mass_recall > 0.5, Status::internal, "self-test: mass recall {} at density 0.2", quality.mass_recall);
  fmt::print("self-test         {} passed: rho = 1 equals dense within {:.1e}; density {:.3f} keeps {:.3f} of the mass\n",
             context.backend().name, largest, sparse->stats.density, quality.mass_recall);
}

void run(const MachineFlags& machine) {
  const Context context(machine.threads, machine.instruction_set);  // GPUs are tested beside it, whatever --backend says
  const auto info = machine_json(context);
  fmt::print("scope             {}\n", SCOPE_VERSION);
  fmt::print("machine           {}, {}\n", info["cpu"].get<std::string>(), info["system"].get<std::string>());
  fmt::print("threads           {} of {} cores\n", context.threads(), available_cores());
  std::string sets;
  for (const auto& set : cpu::instruction_sets()) sets += fmt::format("{}{}", sets.empty() ? "" : ", ", set.name);
  fmt::print("instruction sets  {} (using {})\n", sets, context.instruction_set());
  fmt::print("bf16 dot products {}\n", cpu::bf16_dot_kernels() != nullptr ? "yes" : "no");
  fmt::print("backend cpu       f32, f16, bf16; head dimension up to 256\n");
  if (!cuda::built()) {
    fmt::print("backend cuda      not in this build\n");
  } else {
    const auto devices = cuda::devices();
    if (devices.empty()) fmt::print("backend cuda      built, but there is no GPU or no driver: calls run on the CPU\n");
    for (const auto& device : devices) {
      fmt::print("GPU {}             {}, sm_{}{}, {} multiprocessors, {:.0f} GiB; attend kernel: {}\n", device.index,
                 device.name, device.major, device.minor, device.multiprocessors,
                 static_cast<double>(device.memory_bytes) / (1 << 30),
                 device.major == 9   ? "wgmma"
                 : device.major >= 8 ? "portable"
                                     : "none (sm_80 or later is needed)");
    }
    if (!devices.empty()) fmt::print("backend cuda      f16, bf16; head dimensions that are multiples of 8 up to 128\n");
    for (const auto& device : devices) {
      if (device.major >= 8) self_test(Context::on_gpu(device.index, machine.threads));
    }
  }
  self_test(context);
}

}  // namespace

void add_doctor(CLI::App& app) {
  auto machine = std::make_shared<MachineFlags>();
  CLI::App* command = app.add_subcommand("doctor", "Say what this machine has and run a one-second self-test.");
  machine->add(*command);
  command->callback([machine] { run(*machine); });
}

}  // namespace scope::cli
