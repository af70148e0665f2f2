// scope doctor: what this machine is, what this build can do on it, and a one-second self-test.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "commands.h"
#include "core/numeric.h"
#include "input.h"
#include "json.h"
#include "machine.h"
#include "measure/synthetic.h"
#include "methods/methods.h"
#include "qkv.h"
#include "runner.h"
#include "stages/backends.h"

namespace scope::cli {

namespace {

// A sparse call that keeps every key must equal dense attention, and a selective one must keep what it was asked to.
void self_test(const Context& context) {
  const SyntheticSpec spec{{4, 12, 16}, {44, 42, 42}, 2, 7};
  const bool f32 = finest_dtype(context) == DType::f32;
  const Input input{.qkv = synthetic_qkv(spec, f32 ? "f32" : "bf16", *context.exec().pool)};
  const auto attend = [&](const char* method, std::initializer_list<std::pair<const char*, const char*>> set) {
    Settings settings = find_method(method).settings();
    for (const auto& [name, value] : set) set_setting(settings, name, value);
    auto runner = std::make_unique<Runner>(context, settings, input.shape());
    if (!settings.dense) runner->want_selection();
    runner->run(input.args());
    return runner;
  };
  const auto dense = attend("dense", {}), whole = attend("scope", {{"rho", "1"}});
  const auto sparse = attend("scope", {{"rule", "target"}, {"density", "0.2"}});
  double largest = 0;
  const auto value = [&](const Runner& runner, size_t i) -> double {
    if (!f32) {
      uint16_t bits = 0;
      std::memcpy(&bits, &runner.out[2 * i], 2);
      return bf16_to_f32(bits);
    }
    float x = 0;
    std::memcpy(&x, &runner.out[4 * i], 4);
    return x;
  };
  for (size_t i = 0; i < dense->out.size() / (f32 ? 4 : 2); ++i) {
    largest = std::max(largest, std::abs(value(*dense, i) - value(*whole, i)));
  }
  const Quality quality = measure(context, input.qkv, *sparse, false, 64);
  require(largest < (f32 ? 1e-4 : 0.05), Status::internal, "self-test: rho = 1 differs from dense by {}", largest);
  require(std::abs(sparse->stats.density - 0.2) < 0.01, Status::internal, "self-test: asked for density 0.2, got {}",
          sparse->stats.density);
  require(quality.mass_recall > 0.5, Status::internal, "self-test: mass recall {} at density 0.2", quality.mass_recall);
  fmt::print("self-test         {} passed: rho = 1 equals dense within {:.1e}; density {:.3f} keeps {:.3f} of the mass\n",
             context.backend().name, largest, sparse->stats.density, quality.mass_recall);
}

std::string takes(const Capabilities& can) {
  std::string types;
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    if (can.dtypes.has(type)) types.append(types.empty() ? "" : ", ").append(dtype_name(type));
  }
  return can.dim_multiple == 1
             ? fmt::format("{}; head dimension up to {}", types, can.most_dim)
             : fmt::format("{}; head dimensions that are multiples of {} up to {}", types, can.dim_multiple, can.most_dim);
}

void run(MachineFlags machine) {
  const Context host(machine.threads, machine.instruction_set);
  const auto info = machine_json(host);
  fmt::print("scope             {}\n", version());
  fmt::print("machine           {}, {}\n", info["cpu"].get<std::string>(), info["system"].get<std::string>());
  fmt::print("threads           {} of {} cores, {}\n", host.threads(), available_cores(), host.instruction_set());
  // Every backend is tested, and every device of each.
  for (const Backend* backend : backends()) {
    fmt::print("{:<17} {}\n", fmt::format("backend {}", backend->name), takes(backend->can));
    const std::vector<std::string> inventory = backend->inventory();
    for (const std::string& line : inventory) fmt::print("{}\n", line);
    if (!backend->present()) continue;
    machine.backend = backend->name;
    for (machine.device = 0; machine.device < (backend->can.host ? 1 : std::ssize(inventory)); ++machine.device) {
      try {
        self_test(machine.context());
      } catch (const Error& error) {
        if (error.status() != Status::unsupported) throw;
        fmt::print("self-test         {} skipped: {}\n", backend->name, error.what());
      }
    }
  }
}

}  // namespace

void add_doctor(CLI::App& app) {
  auto machine = std::make_shared<MachineFlags>();
  CLI::App* command = app.add_subcommand("doctor", "Say what this machine has and run a one-second self-test.");
  machine->add_host(*command);
  command->callback([machine] { run(*machine); });
}

}  // namespace scope::cli
