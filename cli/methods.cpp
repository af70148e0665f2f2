// scope methods: the tables of methods, settings and models.
#include "methods/methods.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "commands.h"
#include "io/file.h"
#include "json.h"
#include "methods/models.h"
#include "terminal.h"

namespace scope::cli {

namespace {

void print_tables(bool json) {
  if (json) {
    nlohmann::ordered_json out;
    for (const Method& method : methods_table()) {
      out["methods"].push_back(
          {{"name", method.name}, {"help", method.help}, {"settings", settings_json(method.settings())}});
    }
    for (const Setting& setting : settings_table()) {
      out["settings"].push_back({{"name", setting.name},
                                 {"stage", setting.stage},
                                 {"values", setting.values},
                                 {"default", setting.get(Settings{})},
                                 {"help", setting.help}});
    }
    for (const Model& model : models_table()) {
      out["models"].push_back({{"name", model.name},
                               {"help", model.help},
                               {"layers", model.layers},
                               {"heads", model.heads},
                               {"dim", model.dim},
                               {"rope", model.rope},
                               {"grid", model.grid},
                               {"steps", model.steps},
                               {"rho", model.rho},
                               {"dense_steps", model.dense_steps}});
    }
    fmt::print("{}\n", out.dump(2));
    return;
  }
  fmt::print("{}\n", bold("Methods (--method)"));
  for (const Method& method : methods_table()) fmt::print("  {:<12}  {}\n", method.name, method.help);
  fmt::print("\n{}\n", bold("Settings (--set name=value)"));
  fmt::print("  {:<17} {:<9} {:<41} {:<8} {}\n", "name", "stage", "takes", "default", "");
  for (const Setting& setting : settings_table()) {
    fmt::print("  {:<17} {:<9} {:<41} {:<8} {}\n", setting.name, setting.stage, setting.values, setting.get(Settings{}),
               setting.help);
  }
  fmt::print("\n{}\n", bold("Models (--model): rope ranges, rho and schedule"));
  for (const Model& model : models_table()) {
    fmt::print(
        "  {:<21} {:>2} layers x {:>2} heads x {:>3}  rope {:<8}  grid {:<8}  {:>2} steps  rho {:.2f}  dense {:.0f} %  {}\n",
        model.name, model.layers, model.heads, model.dim, model.has_rope() ? io::join(model.rope, ",") : "none",
        io::join(model.grid, "x"), model.steps, model.rho, 100 * model.dense_steps, model.help);
  }
  fmt::print("\nThe paper does not publish rho; the values here are starting points of ours.\n");
}

}  // namespace

void add_methods(CLI::App& app) {
  auto json = std::make_shared<bool>(false);
  CLI::App* command = app.add_subcommand("methods", "List every method, setting and known model.");
  command->add_flag("--json", *json, "as JSON");
  command->callback([json] { print_tables(*json); });
}

}  // namespace scope::cli
