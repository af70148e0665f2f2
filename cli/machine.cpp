// Makes the context that a command's flags ask for, and describes the machine.
#include "machine.h"

#include <fmt/format.h>
#include <sys/utsname.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <vector>

#include "bounds.h"
#include "stages/backends.h"

namespace scope::cli {

void MachineFlags::add(CLI::App& app) {
  std::vector<std::string> names;
  for (const Backend* each : backends()) names.emplace_back(each->name);
  add_host(app);
  app.add_option("--backend", backend, fmt::format("what calls run on: {}", fmt::join(names, " or ")))
      ->check(CLI::IsMember(names))
      ->capture_default_str();
  app.add_option("--device", device, "which GPU, on a backend of GPUs")->check(whole(0, 1023))->capture_default_str();
}

void MachineFlags::add_host(CLI::App& app) {
  add_threads(app, threads);
  app.add_option("--instruction-set", instruction_set, "the CPU's: auto, avx512, avx2 or portable")->capture_default_str();
}

bool MachineFlags::on_device() const { return !find_backend(backend).can.host; }

Context MachineFlags::context() const {
  require(on_device() || device == 0, Status::invalid_argument, "--device: got {}, and --backend {} has no devices", device,
          backend);
  require(!on_device() || instruction_set == "auto", Status::invalid_argument,
          "--instruction-set: got {}, and --backend {} does not run on the CPU", instruction_set, backend);
  return Context(
      ContextOptions{.backend = backend, .threads = threads, .instruction_set = instruction_set, .device = device});
}

DType finest_dtype(const Context& context) {
  return context.backend().can.dtypes.has(DType::f32) ? DType::f32 : DType::bf16;
}

nlohmann::ordered_json machine_json(const Context& context) {
  std::string cpu = "unknown", line;
  std::ifstream info("/proc/cpuinfo");
  while (std::getline(info, line)) {
    if (line.starts_with("model name")) {
      cpu = line.substr(line.find(':') + 2);
      break;
    }
  }
  utsname system{};
  uname(&system);
  nlohmann::ordered_json json{{"cpu", cpu},
                              {"system", fmt::format("{} {}", system.sysname, system.machine)},
                              {"threads", context.threads()},
                              {"instruction_set", context.instruction_set()}};
  if (!context.device().empty()) json["gpu"] = context.device();
  return json;
}

}  // namespace scope::cli
