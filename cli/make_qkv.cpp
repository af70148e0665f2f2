// scope make-qkv: structured synthetic q, k, v as a .safetensors file.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "bounds.h"
#include "commands.h"
#include "io/safetensors.h"
#include "outputs.h"
#include "parse.h"
#include "qkv.h"
#include "terminal.h"

namespace scope::cli {

namespace {

struct MakeQkvOptions {
  std::string grid = "13x30x52", rope = "44,42,42", dtype = "f32", output;
  int64_t heads = 2;
  uint64_t seed = 1;
  int threads = 0;
};

void run(const MakeQkvOptions& options) {
  const auto grid = parse_list("--grid", options.grid, 'x');
  require(grid.size() == 3, Status::invalid_argument, "--grid: got \"{}\", expected TxHxW such as 13x30x52", options.grid);
  const SyntheticSpec spec{
      {grid[0], grid[1], grid[2]}, parse_list("--rope", options.rope, ','), options.heads, options.seed};
  require(!options.output.ends_with(".npy"), Status::invalid_argument,
          "--output: got {}, and a .npy file holds one array; expected .safetensors", options.output);
  Outputs outputs;
  outputs.writes("--output", options.output);
  ThreadPool pool(options.threads);
  auto progress = std::make_unique<Progress>("make-qkv", spec.heads);
  Qkv qkv = synthetic_qkv(spec, options.dtype, pool, [&] { progress->step("heads"); });
  progress.reset();
  io::SafeTensors file;
  file.tensors["q"] = std::move(qkv.q);
  file.tensors["k"] = std::move(qkv.k);
  file.tensors["v"] = std::move(qkv.v);
  file.metadata = {
      {"grid", options.grid}, {"rope", options.rope}, {"seed", std::to_string(options.seed)}, {"source", "scope make-qkv"}};
  io::write_safetensors(outputs.open(options.output), file);
  outputs.place();
  fmt::print("{}: q, k, v {} [{}, {}, {}], grid {}, rope {}\n", options.output, options.dtype, qkv.heads, qkv.q_tokens,
             qkv.dim, options.grid, options.rope);
}

}  // namespace

void add_make_qkv(CLI::App& app) {
  auto options = std::make_shared<MakeQkvOptions>();
  CLI::App* command = app.add_subcommand(
      "make-qkv",
      "Make q, k, v with real 3D RoPE over smooth, clustered, moving content.\n"
      "Attention over them is structured as in a video model: the exact top 10 % of keys hold most of the mass.");
  command->add_option("--grid", options->grid, "tokens along T, H and W, as TxHxW")->capture_default_str();
  command->add_option("--rope", options->rope, "channels along T, H and W; their sum is the head dimension")
      ->capture_default_str();
  command->add_option("--heads", options->heads, "heads, each of its own character")
      ->check(whole(1, kMostHeads))
      ->capture_default_str();
  command->add_option("--seed", options->seed, "the same seed gives the same file")
      ->check(whole(0, kMostSeed))
      ->capture_default_str();
  command->add_option("--dtype", options->dtype, "f32, f16 or bf16")
      ->check(CLI::IsMember({"f32", "f16", "bf16"}))
      ->capture_default_str();
  command->add_option("-o,--output", options->output, "file to write, .safetensors")->required();
  add_threads(*command, options->threads);
  command->callback([options] { run(*options); });
}

}  // namespace scope::cli
