// What calls run on: a backend, its threads and its device.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "pipeline/plan.h"

namespace CLI {
class App;
}

namespace scope::cli {

struct MachineFlags {
  int threads = 0;
  std::string instruction_set = "auto", backend = "cpu";
  int device = 0;
  void add(CLI::App& app);
  void add_host(CLI::App& app);  // of a command that runs on the CPU alone
  bool on_device() const;
  Context context() const;
};
// f32 where the backend takes it.
DType finest_dtype(const Context& context);
nlohmann::ordered_json machine_json(const Context& context);

}  // namespace scope::cli
