// scope ablate: whole videos by variants of a method against the dense ones of the same seeds, at matched density.
#include <CLI/CLI.hpp>
#include <map>
#include <memory>
#include <string>

#include "ablation_run.h"
#include "bounds.h"
#include "commands.h"

namespace scope::cli {

using ablation::AblateOptions;
using ablation::Match;

namespace {

// What is compared, on which clips and at which points.
void add_comparison(CLI::App& command, AblateOptions& options) {
  CLI::Option* variants =
      command.add_option("--variants", options.variants,
                         "rows of `scope methods`, with settings as name:setting=value+setting=value; otherwise scope");
  options.at.add(command);
  command
      .add_option(
          "--suite", options.suite,
          "paper: partitions, rules, target scopes, proxy and tail, methods, and schedules, each table with its densities")
      ->check(CLI::IsMember({"paper"}))
      ->excludes(variants)
      ->excludes(command.get_option("--density"))
      ->excludes(command.get_option("--rho"));
  command.add_option("--seeds", options.seeds, "how many")->check(whole(1, 10000))->capture_default_str();
  command.add_option("--first-seed", options.first_seed, "noise of the first")
      ->check(whole(0, kMostSeed))
      ->capture_default_str();
  command.add_option("--clips", options.clips, "which samples of the condition, as 0,2; otherwise all");
  command
      .add_option("--match", options.match,
                  "how a density is met. call: solved again in every call; run: by one threshold for the whole run, as the "
                  "paper does; own: not at all, each method runs once at its own settings")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, Match>{{"call", Match::call}, {"run", Match::run}, {"own", Match::own}}))
      ->default_str("call");
  command.add_option("--choose", options.choose,
                     "with --match run: clips whose first two give the thresholds, with noise of their own: samples of the "
                     "condition as --clips takes them (otherwise all), or with --image PNG files");
}

// What the videos are of.
void add_videos(CLI::App& command, AblateOptions& options) {
  command.add_option("--steps", options.steps, "sampling steps; otherwise the model's, or 20")
      ->check(whole(1, kMostSamplerSteps));
  command.add_option("--model", options.model, "model folder, or the name of a bundled one")->capture_default_str();
  command.add_option("--grid", options.grid, "tokens along T, H and W, as 13x20x32; the model's default");
  command.add_option("--condition", options.condition,
                     "prompt embeddings and first frames; otherwise the model's held_out.safetensors or examples");
  command.add_option("--image", options.images, "first frames as PNG, a.png,b.png; otherwise the condition's");
  command.add_option("--shift", options.shift, "of the noise levels; the scheduler's or the model's own, or 5")
      ->check(above(0, 1000));
  command.add_option("--guidance", options.guidance, "classifier-free guidance; 5 where there is a negative prompt")
      ->check(above(0, 1000));
  command.add_option("--guidance-2", options.guidance_2, "of the second expert of Wan2.2; otherwise that of the first")
      ->check(above(0, 1000));
  command.add_option("--compute", options.compute, "f32 or bf16; f32 on the CPU, bf16 on a GPU")
      ->check(CLI::IsMember({"f32", "bf16"}));
}

void add_results(CLI::App& command, AblateOptions& options) {
  command.add_option("--profile", options.profile,
                     "the setting `profile` for svoo: a CSV of `scope generate --profile-out`");
  command.add_flag("--no-control", options.no_control, "leave the control out");
  CLI::Option* output = command.add_option(
      "-o,--output", options.output,
      "write every figure of every seed as JSON; an infinite PSNR is null. What is done before the last seed is kept in a "
      "file beside it, which says \"finished\": false");
  command.add_option(
      "--resume", options.resume,
      "a result of the same videos and variants that is not finished, or has fewer seeds: go on after its last");
  command.add_option("--csv", options.csv, "write a line for each variant, density and seed");
  command.add_option("--plot", options.plot, "write PSNR by density as SVG");
  command
      .add_option("--commit", options.commit, "recorded in the JSON; by default the commit that this command was built from")
      ->needs(output);
}

}  // namespace

void add_ablate(CLI::App& app) {
  auto options = std::make_shared<AblateOptions>();
  CLI::App* command = app.add_subcommand(
      "ablate",
      "Generate the same videos densely and by variants of a method at matched density, and judge them by paired seeds.\n"
      "Seed s is noise s and clip s (modulo how many there are). A density is solved in every call, or with --match run met "
      "by\n"
      "one threshold for the run, found on other videos (--choose);\n"
      "with --rho each variant runs at that rho, and its density is what it keeps there.\n"
      "A control shows what rounding does to a video: dense again in the other type (CPU) or by the other kernel (GPU).\n"
      "A model that gives no frames is judged by its latents, and what is printed and written says so: --condition is that "
      "of\n"
      "scope generate, each of its prompts a clip. Of a pipeline's folder the scheduler says sampler and shift, and both\n"
      "experts of Wan2.2 stay in memory.\n\n"
      "  scope ablate --variants scope,scope:partition=even:8,svg2 --density 0.1,0.2 -o result.json\n"
      "  scope ablate --suite paper --backend cuda -o result.json --plot psnr.svg\n"
      "  scope ablate --variants scope,svg2 --set target_scope=head    # every head meets the density by itself\n"
      "  scope ablate --variants scope,scope:rule=top_p --rho 0.8,0.9\n"
      "  scope ablate --variants scope,scope:density_steps=0.2:0.3,1:0.1,fast    # densities of their own, beside every "
      "one\n"
      "  scope ablate --grid 21x45x80 --condition 720p.safetensors --seeds 3 --backend cuda\n"
      "  scope ablate --model Wan2.1-T2V-1.3B-Diffusers/transformer --grid 21x30x52 --condition prompts.safetensors");
  add_comparison(*command, *options);
  add_videos(*command, *options);
  add_results(*command, *options);
  options->machine.add(*command);
  command->callback([options] { ablation::run(*options); });
}

}  // namespace scope::cli
