// scope profile: how dense the exact attention of each head is, as SVOO's offline profile.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <tuple>

#include "outputs.h"

namespace scope::cli {

namespace {

struct Options {
  std::vector<std::string> files;
  std::string output, samples = "256";
  double mass = 0.95;
  MachineFlags machine;
};

struct Source {
  int64_t step = 0, layer = 0;
  std::string path;
};

Source parse_source(const std::string& text) {
  Source source;
  const char* at = text.data();
  const char* end = at + text.size();
  for (int64_t* value : {&source.step, &source.layer}) {
    const auto [next, error] = std::from_chars(at, end, *value);
    require(error == std::errc() && *value >= 0 && next < end && *next == ':', Status::invalid_argument,
            "profile: got \"{}\", expected STEP:LAYER:FILE such as 10:2:qkv.safetensors", text);
    at = next + 1;
  }
  source.path = std::string(at, end);
  return source;
}

void run(const Options& options) {
  std::vector<Source> sources;
  for (const std::string& file : options.files) sources.push_back(parse_source(file));
  Outputs outputs;
  for (const Source& source : sources) outputs.reads("an input", source.path);
  outputs.writes("--output", options.output);
  const int64_t samples = parse_samples(options.samples);
  const Context context(options.machine.threads, options.machine.instruction_set);
  std::map<std::tuple<int64_t, int64_t, int64_t>, double> densities;  // by step, layer and head
  auto progress = std::make_unique<Progress>("profile", static_cast<int64_t>(sources.size()));
  for (const Source& source : sources) {
    InputFlags flags;
    flags.path = source.path;
    const Input input = flags.read("");
    input.check_measurable("profile");
    const Qkv& qkv = input.qkv;
    for (int64_t b = 0; b < qkv.batch; ++b) {
      for (int64_t h = 0; h < qkv.heads; ++h) {
        double& density = densities[{source.step, source.layer, h}];
        density = std::max(density, exact_density(*context.exec().pool, qkv.view(qkv.q, qkv.q_tokens).head(b, h),
                                                  qkv.view(qkv.k, qkv.k_tokens).head(b, h), options.mass, samples));
      }
    }
    progress->step(source.path);
  }
  progress.reset();
  std::string csv = "step,layer,head,density\n";
  for (const auto& [key, density] : densities) {
    const auto [step, layer, head] = key;
    csv += fmt::format("{},{},{},{:.6f}\n", step, layer, head, density);
  }
  write_text(outputs.open(options.output), csv);
  outputs.place();
  fmt::print("{}: {} heads, density for {} of the mass\n", options.output, densities.size(), options.mass);
}

}  // namespace

void add_profile(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "profile",
      "Measure how dense exact attention is, for each step, layer and head: the fewest keys that hold 95 % of a query's\n"
      "softmax mass, over all keys, as a mean over queries; the maximum over the files (prompts, samples) of one step and "
      "layer.\n"
      "It writes CSV: step,layer,head,density.\n\n"
      "  scope profile 10:2:a.safetensors 10:2:b.safetensors 11:2:c.safetensors -o profile.csv");
  command->add_option("files", options->files, "q, k, v files, each as STEP:LAYER:FILE")->required();
  add_output(*command, "-o,--output", options->output, "CSV file to write")->required();
  command->add_option("--mass", options->mass, "share of the mass")->check(above(0, 1))->capture_default_str();
  command->add_option("--samples", options->samples, "queries per head, or all")->capture_default_str();
  options->machine.add_host(*command);
  command->callback([options] { run(*options); });
}

}  // namespace scope::cli
