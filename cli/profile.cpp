// scope profile: how dense the exact attention of each head is, as SVOO's offline profile, from q, k, v or other profiles.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <memory>
#include <string>
#include <vector>

#include "bounds.h"
#include "commands.h"
#include "input.h"
#include "json.h"
#include "machine.h"
#include "measure/recall.h"
#include "outputs.h"
#include "parse.h"
#include "qkv.h"
#include "run_profile.h"
#include "terminal.h"

namespace scope::cli {

namespace {

struct ProfileOptions {
  std::vector<std::string> files;
  std::string output, samples = "256";
  double mass = kProfileMass;
  MachineFlags machine;
};

struct Source {
  bool profile = false;  // a whole one; else q, k, v of a step and layer
  int64_t step = 0, layer = 0;
  std::string path;
};

Source parse_source(const std::string& text) {
  if (text.ends_with(".csv")) return {.profile = true, .path = text};
  constexpr int64_t kMost = 1'000'000'000;
  Source source;
  const char* at = text.data();
  const char* end = at + text.size();
  for (int64_t* value : {&source.step, &source.layer}) {
    const auto [next, error] = std::from_chars(at, end, *value);
    require(error == std::errc() && *value >= 0 && *value <= kMost && next < end && *next == ':', Status::invalid_argument,
            "profile: got \"{}\", expected STEP:LAYER:FILE such as 10:2:qkv.safetensors, or a profile.csv", text);
    at = next + 1;
  }
  source.path = std::string(at, end);
  return source;
}

void run(const ProfileOptions& options) {
  std::vector<Source> sources;
  for (const std::string& file : options.files) sources.push_back(parse_source(file));
  Outputs outputs;
  for (const Source& source : sources) outputs.reads("an input", source.path);
  outputs.writes("--output", options.output);
  const int64_t samples = parse_samples(options.samples);
  const Context context(options.machine.threads, options.machine.instruction_set);
  Profile profile;
  auto progress = std::make_unique<Progress>("profile", static_cast<int64_t>(sources.size()));
  for (const Source& source : sources) {
    if (source.profile) {
      merge_profile(profile, read_profile(source.path));
      progress->step(source.path);
      continue;
    }
    InputFlags flags;
    flags.path = source.path;
    const Input input = flags.read("");
    input.check_measurable("profile");
    const Qkv& qkv = input.qkv;
    require(profile.heads == 0 || profile.heads == qkv.heads, Status::shape, "profile: {} has {} heads, the others have {}",
            source.path, qkv.heads, profile.heads);
    for (int64_t b = 0; b < qkv.batch; ++b) {
      for (int64_t h = 0; h < qkv.heads; ++h) {
        raise_density(profile, source.step, source.layer, h,
                      exact_density(*context.exec().pool, qkv.view(qkv.q, qkv.q_tokens).head(b, h),
                                    qkv.view(qkv.k, qkv.k_tokens).head(b, h), options.mass, samples));
      }
    }
    progress->step(source.path);
  }
  progress.reset();
  write_text(outputs.open(options.output), profile_csv(profile));
  outputs.place();
  fmt::print("{}: {} entries of {} heads\n", options.output, profile.densities.size(), profile.heads);
}

}  // namespace

void add_profile(CLI::App& app) {
  auto options = std::make_shared<ProfileOptions>();
  CLI::App* command = app.add_subcommand(
      "profile",
      "Measure how dense exact attention is, for each step, layer and head: the fewest keys that hold 95 % of a query's\n"
      "softmax mass, over all keys, as a mean over queries; the maximum over the files (prompts, samples) of one step and "
      "layer.\n"
      "Whole profiles join in: those of `scope generate --method dense --profile-out`, and those of SVOO's authors.\n"
      "It writes CSV: step,layer,head,density, all counted from 0.\n\n"
      "  scope profile 10:2:a.safetensors 10:2:b.safetensors 11:2:c.safetensors -o profile.csv\n"
      "  scope profile one.csv other.csv -o profile.csv");
  command->add_option("files", options->files, "q, k, v files, each as STEP:LAYER:FILE, or profiles, as FILE.csv")
      ->required();
  command->add_option("-o,--output", options->output, "CSV file to write")->required();
  command->add_option("--mass", options->mass, "share of the mass")->check(above(0, 1))->capture_default_str();
  command->add_option("--samples", options->samples, "queries per head, or all")->capture_default_str();
  options->machine.add_host(*command);
  command->callback([options] { run(*options); });
}

}  // namespace scope::cli
