// The scope command: parses, runs one subcommand, turns errors and interrupts into a message and an exit code.
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <new>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "commands.h"
#include "core/nearest.h"
#include "io/temporary.h"
#include "json.h"
#include "terminal.h"

namespace {

// A stream that is closed must not become the number of a file that we open: what is printed would go into a result.
void hold_closed_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(stream, F_GETFD) < 0) static_cast<void>(open("/dev/null", O_RDONLY));  // where writing fails, as it should
  }
}

// Interrupts go to a thread of their own, so that they end a call of minutes at once and files can be removed without the
// restrictions of a signal handler. A signal that the parent ignores (nohup, a job in the background) stays ignored.
// A pipe that nobody reads and a file that grows past its limit are errors of the write, after which we tidy up.
void take_interrupts() {
  for (const int number : {SIGPIPE, SIGXFSZ}) static_cast<void>(signal(number, SIG_IGN));
  sigset_t signals;
  sigemptyset(&signals);
  for (const int number : {SIGHUP, SIGINT, SIGTERM}) {
    struct sigaction action {};
    sigaction(number, nullptr, &action);
    if (action.sa_handler != SIG_IGN) sigaddset(&signals, number);
  }
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // inherited by every thread from here on
  std::thread([signals] {
    int number = 0;
    while (sigwait(&signals, &number) != 0) {
    }
    scope::io::abandon_temporaries();
    scope::cli::tell("{}scope: interrupted\n", scope::cli::over_progress());
    _exit(128 + number);
  }).detach();
}

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

// A reader that has seen enough, such as head, is no error to tell of.
int stdout_failed(int error) {
  if (error == EPIPE) return 128 + SIGPIPE;
  scope::cli::tell("scope: cannot write to standard output: {}\n", std::generic_category().message(error));
  return exit_code(scope::Status::io);
}

// What an error quotes came from files and arguments: without control characters, and no longer than a screen.
std::string shown(std::string text) {
  for (char& c : text) {
    if ((c >= 0 && c < ' ' && c != '\n') || c == '\x7f') c = '?';
  }
  constexpr size_t kEnds = 1000;
  if (text.size() > 2 * kEnds) text = text.substr(0, kEnds) + " ... " + text.substr(text.size() - kEnds);
  return text;
}

int parse_error(const CLI::App& app, const CLI::ParseError& error) {
  std::ostringstream out, err;
  const bool fine = app.exit(error, out, err) == 0;  // --help and --version
  fmt::print("{}", out.str());
  scope::cli::tell("{}", shown(err.str()));
  return fine ? 0 : 2;
}

void check_command(const CLI::App& app, int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') return;
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (command->get_name() == argv[1]) return;
    names.push_back(command->get_name());
  }
  scope::fail(scope::Status::invalid_argument, "there is no command \"{}\"{}; there are {}", argv[1],
              scope::did_you_mean(argv[1], {names.begin(), names.end()}), fmt::join(names, ", "));
}

int run(int argc, char** argv) {
  CLI::App app(
      "Sparse attention for video diffusion transformers: SCOPE, on your own q, k, v.\n\n"
      "  scope make-qkv --grid 13x30x52 --rope 44,42,42 -o qkv.safetensors     make structured q, k, v\n"
      "  scope attend qkv.safetensors -o out.safetensors --stats stats.json    attend sparsely\n"
      "  scope attend qkv.safetensors -o out.safetensors --set rule=target --set density=0.2\n"
      "  scope compare qkv.safetensors --methods scope,svg2,sparge --density 0.1,0.2   methods side by side\n"
      "  scope inspect qkv.safetensors -o look                                 pictures of a head\n"
      "  scope generate -o runs/scope --target-density 0.2                     a video with the bundled model\n"
      "  scope steps --model wan2.1-t2v-14b --backend cuda                     how long a model would take\n"
      "  scope methods                                                         every method and setting\n",
      "scope");
  app.require_subcommand(1);
  app.set_version_flag("--version", scope::cli::version());
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
  scope::cli::add_steps(app);
  // '' is a variable that was not set, and would read as an option that was not given.
  for (CLI::App* command : app.get_subcommands([](CLI::App*) { return true; })) {
    for (CLI::Option* option : command->get_options()) {
      if (option->get_items_expected_max() == 0) continue;
      option->check(
          [](const std::string& value) { return std::string(value.empty() ? "expected a value, got nothing" : ""); });
    }
  }
  try {
    take_interrupts();
    check_command(app, argc, argv);
    try {
      app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      return parse_error(app, error);
    }
    return 0;
  } catch (const scope::Error& error) {
    scope::cli::tell("scope: {}\n", shown(error.what()));
    return exit_code(error.status());
  } catch (const std::bad_alloc&) {
    scope::cli::tell("scope: out of memory\n");
    return 5;
  } catch (const std::system_error& error) {
    if (std::ferror(stdout) != 0) return stdout_failed(error.code().value());
    scope::cli::tell("scope: {}\n", shown(error.what()));
    return error.code() == std::errc::resource_unavailable_try_again ? 5 : 1;  // 5: a thread could not be started
  } catch (const std::exception& error) {
    scope::cli::tell("scope: {}\n", shown(error.what()));
    return 1;
  }
}

}  // namespace

// Describing the options can fail only for lack of memory, before anything was done.
// NOLINTNEXTLINE(bugprone-exception-escape)
int main(int argc, char** argv) {
  hold_closed_streams();
  const int code = run(argc, argv);
  // What is printed may be lost as late as here: on a full disk, say.
  if (code != 0 || (std::fflush(stdout) == 0 && std::ferror(stdout) == 0)) return code;
  return stdout_failed(errno);
}
