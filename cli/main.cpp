// The scope command: parses, runs one subcommand, turns errors into a message and an exit code.
#include <fmt/format.h>

#include <new>

#include "common.h"

namespace {

// 0 success, 2 usage, 3 bad input, 4 device lost, 5 memory, 1 anything else.
int exit_code(scope::Status status) {
  switch (status) {
    case scope::Status::invalid_argument:
      return 2;
    case scope::Status::shape:
    case scope::Status::dtype:
    case scope::Status::alignment:
    case scope::Status::unsupported:
    case scope::Status::size_limit:
    case scope::Status::non_finite:
    case scope::Status::io:
    case scope::Status::format:
      return 3;
    case scope::Status::device_lost:
      return 4;
    case scope::Status::out_of_memory:
      return 5;
    default:
      return 1;
  }
}

}  // namespace

// Describing the options can fail only for lack of memory, before anything was done.
// NOLINTNEXTLINE(bugprone-exception-escape)
int main(int argc, char** argv) {
  CLI::App app(
      "Sparse attention for video diffusion transformers: SCOPE, on your own q, k, v.\n\n"
      "  scope make-qkv --grid 13x30x52 --rope 44,42,42 -o qkv.safetensors     make structured q, k, v\n"
      "  scope attend qkv.safetensors -o out.safetensors --stats stats.json    attend sparsely\n"
      "  scope attend qkv.safetensors -o out.safetensors --set rule=target --set density=0.2\n"
      "  scope compare qkv.safetensors --methods scope,svg2,sparge --density 0.1,0.2   methods side by side\n"
      "  scope inspect qkv.safetensors -o look                                 pictures of a head\n"
      "  scope generate -o runs/scope --target-density 0.2                     a video with the bundled model\n"
      "  scope methods                                                         every method and setting\n",
      "scope");
  app.require_subcommand(1);
  app.set_version_flag("--version", SCOPE_VERSION);
  scope::cli::add_make_qkv(app);
  scope::cli::add_attend(app);
  scope::cli::add_compare(app);
  scope::cli::add_bench(app);
  scope::cli::add_demo(app);
  scope::cli::add_doctor(app);
  scope::cli::add_evaluate(app);
  scope::cli::add_inspect(app);
  scope::cli::add_generate(app);
  scope::cli::add_ablate(app);
  scope::cli::add_methods(app);
  scope::cli::add_profile(app);
  scope::cli::add_report(app);
  try {
    app.parse(argc, argv);
    return 0;
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const scope::Error& error) {
    fmt::print(stderr, "scope: {}\n", error.what());
    return exit_code(error.status());
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "scope: out of memory\n");
    return 5;
  } catch (const std::exception& error) {
    fmt::print(stderr, "scope: {}\n", error.what());
    return 1;
  }
}
