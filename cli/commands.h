// The commands.
#pragma once

namespace CLI {
class App;
}

namespace scope::cli {

// Each adds itself and runs through its callback.
void add_ablate(CLI::App& app);
void add_make_qkv(CLI::App& app);
void add_attend(CLI::App& app);
void add_bench(CLI::App& app);
void add_compare(CLI::App& app);
void add_demo(CLI::App& app);
void add_doctor(CLI::App& app);
void add_evaluate(CLI::App& app);
void add_inspect(CLI::App& app);
void add_generate(CLI::App& app);
void add_methods(CLI::App& app);
void add_profile(CLI::App& app);
void add_report(CLI::App& app);
void add_steps(CLI::App& app);

}  // namespace scope::cli
