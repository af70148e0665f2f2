// Writes and reads checkpoints, and tells one run from another.
#include "checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <span>

#include "bounds.h"
#include "io/safetensors.h"
#include "methods/methods.h"

namespace scope::cli {

namespace {

constexpr const char* kStepsDone = "steps done";

// FNV-1a of 64 bits.
class Hash {
 public:
  void add(std::span<const std::byte> bytes) {
    for (const std::byte b : bytes) value_ = (value_ ^ static_cast<uint64_t>(b)) * 0x100000001b3u;
  }
  std::string text() const { return fmt::format("{:016x}", value_); }

 private:
  uint64_t value_ = 0xcbf29ce484222325u;
};

// Size and bytes of a file: all of a small one, 4 KiB at each of 256 places of a larger one.
void add_file(const std::string& path, Hash& hash) {
  constexpr int64_t kPiece = 4096, kPieces = 256;
  const io::Source file = io::file_source(path);
  hash.add(std::as_bytes(std::span(&file.size, 1)));
  const bool whole = file.size <= kPiece * kPieces;
  std::vector<std::byte> piece;
  for (int64_t i = 0; i < kPieces; ++i) {
    const int64_t at = whole ? i * kPiece : (file.size - kPiece) * i / (kPieces - 1);
    if (at >= file.size) break;
    piece.resize(static_cast<size_t>(std::min(kPiece, file.size - at)));
    file.read(at, piece);
    hash.add(piece);
  }
}

std::string hash_model(const video::Folder& folder) {
  Hash hash;
  for (const std::string& transformer : folder.transformers) {
    std::vector<std::string> files;
    for (const auto& entry : std::filesystem::directory_iterator(transformer)) {
      const std::string name = entry.path().filename();
      if (name.starts_with("diffusion_pytorch_model") || name == "config.json") files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
    for (const std::string& file : files) add_file(file, hash);
  }
  return hash.text();
}

template <class T>
io::Array array_of(io::ElementType type, std::vector<int64_t> shape, const std::vector<T>& values) {
  io::Array array{type, std::move(shape), std::vector<std::byte>(values.size() * sizeof(T))};
  if (!values.empty()) std::memcpy(array.data.data(), values.data(), array.data.size());
  return array;
}

template <class T>
std::vector<T> values_of(const io::SafeTensors& file, const std::string& name, io::ElementType type) {
  const auto found = file.tensors.find(name);
  require(found != file.tensors.end() && found->second.type == type, Status::format, "there is no {} of {}", name,
          io::element_name(type));
  std::vector<T> values(found->second.data.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), found->second.data.data(), found->second.data.size());
  return values;
}

std::string numbered(const char* name, size_t i) { return fmt::format("{}.{:05}", name, i); }

constexpr size_t kCallNumbers = 7, kHeadNumbers = 2;

video::CallReport call_of(const double* call, const double* heads, size_t count) {
  video::CallReport out;
  out.step = static_cast<int64_t>(call[0]);
  out.layer = static_cast<int64_t>(call[1]);
  out.branch = static_cast<int64_t>(call[2]);
  out.stats.reason = static_cast<Reason>(static_cast<int>(call[3]));
  out.stats.density = call[4];
  out.stats.attend = call[5];
  out.stats.total = call[6];
  out.heads.resize(count);
  for (size_t h = 0; h < count; ++h) {
    out.heads[h].head_budget = static_cast<int64_t>(heads[h * kHeadNumbers]);
    out.heads[h].density = heads[h * kHeadNumbers + 1];
  }
  return out;
}

video::Snapshot parse_checkpoint(const io::SafeTensors& file, int64_t steps_done) {
  video::Snapshot out;
  out.steps_done = steps_done;
  out.latent = values_of<float>(file, "latent", io::ElementType::f32);
  for (size_t i = 0; file.tensors.contains(numbered("history", i)); ++i) {
    out.history.push_back(values_of<float>(file, numbered("history", i), io::ElementType::f32));
  }
  for (size_t i = 0; file.tensors.contains(numbered("state", i)); ++i) {
    out.states.push_back(values_of<std::byte>(file, numbered("state", i), io::ElementType::u8));
  }
  const auto calls = values_of<double>(file, "calls", io::ElementType::f64);
  const auto heads = values_of<double>(file, "heads", io::ElementType::f64);
  const auto seconds = values_of<double>(file, "seconds", io::ElementType::f64);
  const size_t count = calls.size() / kCallNumbers, each = count == 0 ? 0 : heads.size() / count / kHeadNumbers;
  require(seconds.size() == 1 && count * kCallNumbers == calls.size() && count * each * kHeadNumbers == heads.size(),
          Status::format, "calls, heads and seconds: their sizes disagree");
  out.seconds = seconds[0];
  const auto inside = [](double x, int64_t end) { return x >= 0 && x < static_cast<double>(end); };
  for (size_t i = 0; i < count; ++i) {
    const double* call = calls.data() + i * kCallNumbers;
    require(inside(call[0], steps_done) && inside(call[1], kMostLayers) && inside(call[2], 2) && inside(call[3], 6),
            Status::format, "calls: row {} is none", i);
    for (size_t h = 0; h < each; ++h) {
      require(inside(heads[(i * each + h) * kHeadNumbers], int64_t{1} << 53), Status::format, "heads: row {} is none", i);
    }
    out.calls.push_back(call_of(call, heads.data() + i * each * kHeadNumbers, each));
  }
  return out;
}

}  // namespace

std::string hash_of(std::initializer_list<const std::vector<float>*> parts) {
  Hash hash;
  for (const auto* part : parts) {
    const auto size = static_cast<uint64_t>(part->size());
    hash.add(std::as_bytes(std::span(&size, 1)));
    hash.add(std::as_bytes(std::span(*part)));
  }
  return hash.text();
}

RunIdentity identify_run(const video::Folder& folder, const video::Request& request, const std::string& seed,
                         const Context& context, const std::string& compute) {
  RunIdentity run{{"version", SCOPE_VERSION},
                  {"method", request.settings.method->name},
                  {"grid", io::join(request.grid, "x")},
                  {"steps", std::to_string(request.steps)},
                  {"sampler", request.sampler == video::Sampler::unipc ? "unipc" : "euler"},
                  {"shift", fmt::format("{}", request.shift)},
                  {"boundary", fmt::format("{}", request.boundary)},
                  {"guidance", fmt::format("{}", request.guidance)},
                  {"guidance-2", fmt::format("{}", request.guidance_2)},
                  {"seed", seed.empty() ? "of a file" : seed},
                  {"model", hash_model(folder)},
                  {"noise", hash_of({&request.noise})},
                  {"condition", hash_of({&request.condition, &request.first_frame})},
                  {"prompt", hash_of({&request.prompt.text, &request.prompt.image, &request.prompt.pooled})},
                  {"negative prompt", hash_of({&request.negative.text, &request.negative.image, &request.negative.pooled})},
                  {"embedded guidance", fmt::format("{}", request.prompt.guidance)},
                  {"compute", compute},
                  {"backend", context.backend().name},
                  {"instruction set", context.instruction_set()}};
  for (const Setting& setting : settings_table()) {
    run.emplace_back(fmt::format("setting {}", setting.name), setting.get(request.settings));
  }
  if (request.settings.profile != nullptr) {
    Hash hash;
    add_file(request.settings.profile->path, hash);
    run.emplace_back("profile", hash.text());
  }
  return run;
}

void write_checkpoint(const std::string& path, const RunIdentity& run, video::Snapshot snapshot) {
  io::SafeTensors file;
  file.metadata = {run.begin(), run.end()};
  file.metadata[kStepsDone] = std::to_string(snapshot.steps_done);
  const auto floats = [&](const std::string& name, const std::vector<float>& values) {
    file.tensors[name] = array_of(io::ElementType::f32, {std::ssize(values)}, values);
  };
  floats("latent", snapshot.latent);
  for (size_t i = 0; i < snapshot.history.size(); ++i) floats(numbered("history", i), snapshot.history[i]);
  for (size_t i = 0; i < snapshot.states.size(); ++i) {
    std::vector<std::byte>& bytes = snapshot.states[i];  // moved, since these are what may be gigabytes
    file.tensors[numbered("state", i)] = {io::ElementType::u8, {std::ssize(bytes)}, std::move(bytes)};
  }
  std::vector<double> calls, heads;
  for (const video::CallReport& call : snapshot.calls) {
    const CallStats& s = call.stats;
    for (const int64_t n : {call.step, call.layer, call.branch, static_cast<int64_t>(s.reason)}) {
      calls.push_back(static_cast<double>(n));
    }
    calls.insert(calls.end(), {s.density, s.attend, s.total});
    for (const HeadStats& head : call.heads) {
      heads.insert(heads.end(), {static_cast<double>(head.head_budget), head.density});
    }
  }
  file.tensors["calls"] = array_of(io::ElementType::f64, {std::ssize(calls)}, calls);
  file.tensors["heads"] = array_of(io::ElementType::f64, {std::ssize(heads)}, heads);
  file.tensors["seconds"] = array_of(io::ElementType::f64, {1}, std::vector{snapshot.seconds});
  io::write_safetensors(path, file);
}

std::optional<video::Snapshot> read_checkpoint(const std::string& path, const RunIdentity& run, int64_t steps) {
  if (path.empty() || !io::exists(path)) return std::nullopt;
  io::SafeTensors file = io::read_safetensors(path);
  const std::string done = file.metadata[kStepsDone];
  require(!done.empty() && done.size() < 10 && done.find_first_not_of("0123456789") == std::string::npos, Status::format,
          "--checkpoint: {} is no checkpoint; it is left alone", path);
  for (const auto& [name, here] : run) {
    const auto found = file.metadata.find(name);
    const std::string there = found == file.metadata.end() ? "nothing" : found->second;
    require(there == here, Status::invalid_argument,
            "--checkpoint: {} is of another run: {} is {} there and {} here; it is left alone", path, name,
            io::printable(there), here);
  }
  const int64_t steps_done = std::stoll(done);
  require(steps_done >= 1 && steps_done < steps, Status::format, "--checkpoint: {} says that {} of {} steps are done", path,
          steps_done, steps);
  return io::with_path(path, [&] { return parse_checkpoint(file, steps_done); });
}

}  // namespace scope::cli
