// scope make-qkv: structured synthetic q, k, v as a .safetensors file.
#include <fmt/format.h>

#include <cstring>

#include "common.h"
#include "core/numeric.h"
#include "io/safetensors.h"
#include "measure/synthetic.h"

namespace scope::cli {

namespace {

struct Options {
  std::string grid = "13x30x52", rope = "44,42,42", dtype = "f32", output;
  int64_t heads = 2;
  uint64_t seed = 1;
  MachineFlags machine;
};

io::Array to_array(const std::vector<float>& x, const SyntheticQkv& qkv, const std::string& dtype) {
  io::Array array{io::ElementType::f32, {qkv.heads, qkv.tokens, qkv.dim}, {}};
  if (dtype == "f32") {
    array.data.resize(x.size() * 4);
    std::memcpy(array.data.data(), x.data(), array.data.size());
    return array;
  }
  array.type = dtype == "f16" ? io::ElementType::f16 : io::ElementType::bf16;
  array.data.resize(x.size() * 2);
  for (size_t i = 0; i < x.size(); ++i) {
    const uint16_t bits = dtype == "f16" ? f32_to_f16(x[i]) : f32_to_bf16(x[i]);
    std::memcpy(array.data.data() + 2 * i, &bits, 2);
  }
  return array;
}

void run(const Options& options) {
  const auto grid = parse_list("--grid", options.grid, 'x');
  require(grid.size() == 3, Status::invalid_argument, "--grid: got \"{}\", expected TxHxW such as 13x30x52", options.grid);
  const SyntheticSpec spec{
      {grid[0], grid[1], grid[2]}, parse_list("--rope", options.rope, ','), options.heads, options.seed};
  ThreadPool pool(options.machine.threads);
  auto progress = std::make_unique<Progress>("make-qkv", spec.heads);
  const SyntheticQkv qkv = make_qkv(spec, pool, [&] { progress->step("heads"); });
  progress.reset();
  io::SafeTensors file;
  file.tensors["q"] = to_array(qkv.q, qkv, options.dtype);
  file.tensors["k"] = to_array(qkv.k, qkv, options.dtype);
  file.tensors["v"] = to_array(qkv.v, qkv, options.dtype);
  file.metadata = {
      {"grid", options.grid}, {"rope", options.rope}, {"seed", std::to_string(options.seed)}, {"source", "scope make-qkv"}};
  io::write_safetensors(options.output, file);
  fmt::print("{}: q, k, v {} [{}, {}, {}], grid {}, rope {}\n", options.output, options.dtype, qkv.heads, qkv.tokens,
             qkv.dim, options.grid, options.rope);
}

}  // namespace

void add_make_qkv(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "make-qkv",
      "Make q, k, v with real 3D RoPE over smooth, clustered, moving content.\n"
      "Attention over them is structured as in a video model: the exact top 10 % of keys hold most of the mass.");
  command->add_option("--grid", options->grid, "tokens along T, H and W, as TxHxW")->capture_default_str();
  command->add_option("--rope", options->rope, "channels along T, H and W; their sum is the head dimension")
      ->capture_default_str();
  command->add_option("--heads", options->heads, "heads, each of its own character")->capture_default_str();
  command->add_option("--seed", options->seed, "the same seed gives the same file")->capture_default_str();
  command->add_option("--dtype", options->dtype, "f32, f16 or bf16")
      ->check(CLI::IsMember({"f32", "f16", "bf16"}))
      ->capture_default_str();
  command->add_option("-o,--output", options->output, "file to write, .safetensors")->required();
  options->machine.add(*command);
  command->callback([options] { run(*options); });
}

}  // namespace scope::cli
