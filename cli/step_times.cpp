// The table of scope steps and its JSON.
#include "step_times.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "io/file.h"
#include "json.h"
#include "machine.h"
#include "methods/methods.h"
#include "terminal.h"

namespace scope::cli {

namespace {

double fastest(const std::vector<double>& seconds) { return *std::min_element(seconds.begin(), seconds.end()); }

// Of the variant's schedule.
double dense_pass(const StepsCase& c) { return c.dense.total + (c.variant->clustering > 0 ? c.warm.clusters : 0); }

// What a product multiplies.
std::string operands(const StepTimes& found, const video::LinearShape& shape) { return shape.fp8 ? "e4m3" : found.compute; }

nlohmann::ordered_json linear_json(const StepTimes& found) {
  double flop = 0, seconds = 0, own = 0;
  auto shapes = nlohmann::ordered_json::array();
  for (const auto& [shape, time] : found.linears) {
    const auto calls = static_cast<double>(time.calls);
    flop += calls * shape.flop();
    seconds += time.seconds;
    nlohmann::ordered_json row{{"rows", shape.rows},
                               {"in", shape.in},
                               {"out", shape.out},
                               {"type", dtype_name(shape.type)},
                               {"operands", operands(found, shape)},
                               {"calls", time.calls},
                               {"seconds", time.seconds / calls},
                               {"cublaslt_first", nullptr},
                               {"cublaslt_fastest", nullptr}};
    if (const auto tried = found.algorithms.find(shape); tried != found.algorithms.end()) {
      row["cublaslt_first"] = tried->second[0];
      row["cublaslt_fastest"] = fastest(tried->second);
      own += calls * fastest(tried->second);
    }
    shapes.push_back(row);
  }
  auto left = nlohmann::ordered_json::array();
  for (const auto& [size, matrices] : found.not_quantised) {
    left.push_back({{"in", size.first}, {"out", size.second}, {"matrices", matrices}});
  }
  nlohmann::ordered_json out{{"mode", found.linear_mode},
                             {"not_quantised", left},
                             {"tflops", flop / seconds / 1e12},
                             {"cublaslt_tflops", nullptr},
                             {"share", nullptr}};
  if (own > 0) {
    out["cublaslt_tflops"] = flop / own / 1e12;
    out["share"] = own / seconds;
  }
  out["shapes"] = shapes;
  return out;
}

nlohmann::ordered_json case_json(const StepTimes& found, const StepsCase& c) {
  const StepsVariant& v = *c.variant;
  const bool sparse = v.sparse > 0;
  const auto seconds = [](bool there, double value) { return there ? nlohmann::ordered_json(value) : nullptr; };
  const PassTime& pass = sparse ? c.warm : c.dense;
  return {{"variant", v.name},
          {"settings", settings_json(v.settings)},
          {"density", seconds(v.settings.target_density > 0, v.settings.target_density)},
          {"measured_density", seconds(sparse, c.warm.density)},
          {"dense_pass_s", seconds(v.dense + v.clustering > 0, dense_pass(c))},
          {"first_pass_s", seconds(sparse, c.first.total)},
          {"warm_pass_s", seconds(sparse, c.warm.total)},
          {"parts",
           {{"dense_attention", pass.dense_attention},
            {"attend", pass.attend},
            {"selection", pass.selection},
            {"linear", pass.linear},
            {"rest", pass.rest()}}},
          {"run_s", c.run},
          {"times_faster", found.cases[0].run / c.run},
          {"peak_bytes", c.peak_bytes},
          {"output", c.output}};
}

size_t width(const StepTimes& found) {
  size_t most = 8;
  for (const StepsVariant& variant : found.variants) most = std::max(most, variant.name.size());
  return most;
}

}  // namespace

PassTime median_pass(std::vector<PassTime> passes) {
  std::sort(passes.begin(), passes.end(), [](const PassTime& a, const PassTime& b) { return a.total < b.total; });
  const PassTime &a = passes[(passes.size() - 1) / 2], &b = passes[passes.size() / 2];
  PassTime out;
  for (double PassTime::*part : {&PassTime::total, &PassTime::dense_attention, &PassTime::attend, &PassTime::selection,
                                 &PassTime::linear, &PassTime::clusters, &PassTime::density}) {
    out.*part = (a.*part + b.*part) / 2;
  }
  return out;
}

bool has_own_dense(const StepTimes& found, const StepsVariant& variant) {
  const Settings &own = variant.settings, &dense = found.variants[0].settings;
  const bool same = own.products == dense.products && own.kernel == dense.kernel;
  return own.dense || (variant.dense + variant.clustering > 0 && !same);
}

double run_seconds(const StepTimes& found, const StepsCase& c) {
  const StepsVariant& v = *c.variant;
  const auto passes = [&](int64_t steps) { return static_cast<double>(steps * found.branches); };
  const double states = v.settings.method->shares_branches ? 1 : static_cast<double>(found.branches);
  const double dense = passes(v.dense + v.clustering) * c.dense.total + passes(v.sparse) * c.warm.total;
  if (v.sparse == 0) return dense;
  if (v.clustering == 0) return dense + states * (c.first.total - c.warm.total);
  return dense + passes(v.clustering) * c.warm.clusters + states * (c.first.clusters - c.warm.clusters);
}

std::string gigabytes(int64_t bytes) { return fmt::format("{:.1f} GB", static_cast<double>(bytes) / 1e9); }

void print_title(const StepTimes& found, const Context& context) {
  const std::string layers = found.layers == found.model_layers
                                 ? ""
                                 : fmt::format(", the first {} of its {} layers", found.layers, found.model_layers);
  fmt::print("{}\n",
             bold(fmt::format(
                 "{} at {} with random weights{}{}: {} tokens, text of {}, {} steps of {} pass{}, {}; {}", found.model,
                 io::join(found.grid, "x"), layers, found.known.empty() ? "" : ", known model " + found.known,
                 found.grid[0] * found.grid[1] * found.grid[2], found.text_tokens, found.steps, found.branches,
                 found.branches == 1 ? "" : "es",
                 found.linear_mode == "plain" ? found.compute
                                              : fmt::format("{}, large linear layers {}", found.compute, found.linear_mode),
                 context.device().empty() ? fmt::format("{} threads, {}", context.threads(), context.instruction_set())
                                          : context.device())));
  fmt::print("{:<{}}  {:>7}  {:>8} {:>8} {:>8} = {:>8} {:>8} {:>9} {:>8} {:>8}  {:>9} {:>7}  {:>8}\n", "", width(found),
             "density", "dense s", "first s", "warm s", "dense", "attend", "selection", "linear", "rest", "run s", "faster",
             "memory");
  std::fflush(stdout);
}

void print_case(const StepTimes& found, const StepsCase& c) {
  const bool sparse = c.variant->sparse > 0;
  const PassTime& pass = sparse ? c.warm : c.dense;
  const auto seconds = [](bool there, double value) { return there ? fmt::format("{:.3f}", value) : ""; };
  tell("{}", over_progress());
  fmt::print("{:<{}}  {:>7}  {:>8} {:>8} {:>8} = {:>8.3f} {:>8.3f} {:>9.3f} {:>8.3f} {:>8.3f}  {:>9.1f} {:>6.2f}x  {:>8}\n",
             c.variant->name, width(found), seconds(sparse, c.warm.density),
             seconds(c.variant->dense + c.variant->clustering > 0, dense_pass(c)), seconds(sparse, c.first.total),
             seconds(sparse, c.warm.total), pass.dense_attention, pass.attend, pass.selection, pass.linear, pass.rest(),
             c.run, found.cases[0].run / c.run, gigabytes(c.peak_bytes));
  std::fflush(stdout);
}

void print_linear(const StepTimes& found) {
  fmt::print(
      "Seconds of a pass, one forward of one branch: dense, the first sparse one and a warm one, which is made of dense\n"
      "self-attention, attend and selection of sparse calls, linear layers and the rest. run: every pass of {} steps, by\n"
      "these; faster: than the dense run.\n",
      found.steps);
  const auto linear = linear_json(found);
  fmt::print("linear layers of a dense pass: {:.4g} TFLOP/s", linear["tflops"].get<double>());
  if (!found.algorithms.empty()) {
    fmt::print(", {:.1f} % of what cuBLASLt alone has with its fastest algorithms, {:.4g}",
               100 * linear["share"].get<double>(), linear["cublaslt_tflops"].get<double>());
  }
  fmt::print("\n");
  for (const auto& [size, matrices] : found.not_quantised) {
    fmt::print("  {} of {} -> {} stay {}: fp8 takes multiples of {}\n",
               matrices == 1 ? "1 matrix" : fmt::format("{} matrices", matrices), size.first, size.second, found.compute,
               video::kFp8Sizes);
  }
  for (const auto& [shape, seconds] : found.algorithms) {
    const video::LinearTime& time = found.linears.at(shape);
    fmt::print(
        "  {:>6} x {:>5} -> {:>5} {:>4}, {}: {:>4} calls of {:>9.3f} ms; cuBLASLt's first algorithm {:>9.3f}, fastest "
        "{:>9.3f}\n",
        shape.rows, shape.in, shape.out, operands(found, shape), dtype_name(shape.type), time.calls,
        1e3 * time.seconds / static_cast<double>(time.calls), 1e3 * seconds[0], 1e3 * fastest(seconds));
  }
}

nlohmann::ordered_json to_json(const StepTimes& found, const Context& context) {
  nlohmann::ordered_json out{{"commit", found.commit},
                             {"machine", machine_json(context)},
                             {"host", "native"},
                             {"model", std::filesystem::path(found.folder).filename().string()},
                             {"config", nlohmann::ordered_json::parse(found.config)},
                             {"layers", found.layers},
                             {"model_layers", found.model_layers},
                             {"known", found.known.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(found.known)},
                             {"grid", found.grid},
                             {"tokens", found.grid[0] * found.grid[1] * found.grid[2]},
                             {"text", found.text_tokens},
                             {"branches", found.branches},
                             {"steps", found.steps},
                             {"seed", found.seed},
                             {"dtype", found.compute},
                             {"repeat", found.repeat},
                             {"linear", linear_json(found)},
                             {"cases", nlohmann::ordered_json::array()}};
  for (const StepsCase& c : found.cases) out["cases"].push_back(case_json(found, c));
  return out;
}

}  // namespace scope::cli
