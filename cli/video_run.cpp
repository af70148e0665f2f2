// Finds a model, reads what the bundled one is conditioned on, and sums up a run.
#include "video_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <set>

#include "io/png.h"
#include "machine.h"
#include "methods/methods.h"
#include "video/footprint.h"
#include "video/weights.h"

namespace scope::cli {

namespace fs = std::filesystem;

extern const char* const kSourceModels;  // source_models.cpp

namespace {

// The transformer of each step from one on.
std::vector<int64_t> experts_from(const video::Request& request, int64_t first_step) {
  std::vector<int64_t> experts = video::experts_of(request);
  experts.erase(experts.begin(), experts.begin() + first_step);
  return experts;
}

}  // namespace

std::string find_model_folder(const std::string& name, bool shapes) {
  const auto is_model = [](const std::string& folder) {
    return io::exists(folder + "/config.json") || io::exists(folder + "/model_index.json");
  };
  if (name.find('/') != std::string::npos || is_model(name)) return name;
  std::vector<std::string> places;
  // NOLINTNEXTLINE(concurrency-mt-unsafe): nothing here changes the environment
  if (const char* set = std::getenv("SCOPE_MODELS"); set != nullptr) places.emplace_back(set);
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error);
  if (!error) places.push_back((self.parent_path().parent_path() / "share/scope/models").string());
  places.emplace_back(kSourceModels);
  for (const std::string& place : places) {
    for (const char* part : {"", "/shapes"}) {
      std::string folder = fmt::format("{}{}/{}", place, part, name);
      if ((shapes || *part == 0) && is_model(folder)) return folder;
    }
  }
  std::set<std::string> bundled;
  for (const std::string& place : places) {
    for (const auto& entry : fs::directory_iterator(place + "/shapes", error)) bundled.insert(entry.path().filename());
  }
  fail(Status::io, "--model: there is no \"{}\" in {}{}", name, fmt::join(places, ", "),
       shapes ? fmt::format("; shapes there: {}", fmt::join(bundled, ", ")) : "");
}

std::vector<float> take_floats(const std::string& path, const io::SafeTensors& file, const std::string& name,
                               const std::vector<int64_t>& shape, int64_t pick) {
  const auto found = file.tensors.find(name);
  require(found != file.tensors.end(), Status::format, "{}: there is no tensor \"{}\"", path, name);
  std::vector<int64_t> got = found->second.shape;
  std::vector<float> values = io::with_path(path + ": " + name, [&] { return video::to_f32(found->second); });
  require(std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); }), Status::non_finite,
          "{}: {} holds NaN or Inf", path, name);
  if (got.size() == shape.size() + 1) {
    require(pick < got[0], Status::shape, "{}: {} holds {} samples, --example asks for {} (from 0)", path, name, got[0],
            pick);
    const auto each = static_cast<int64_t>(values.size()) / got[0];
    values = std::vector<float>(values.begin() + pick * each, values.begin() + (pick + 1) * each);
    got.erase(got.begin());
  }
  bool fits = got.size() == shape.size();
  for (size_t i = 0; fits && i < shape.size(); ++i) fits = shape[i] < 0 || got[i] == shape[i];
  std::string expected;
  for (const int64_t n : shape)
    expected += fmt::format("{}{}", expected.empty() ? "" : ", ", n < 0 ? "n" : std::to_string(n));
  require(fits, Status::shape, "{}: {} has shape [{}], expected [{}]", path, name, io::join(got), expected);
  return values;
}

int64_t prompt_length(const std::string& path, const io::SafeTensors& file, const std::string& name, int64_t tokens,
                      int64_t pick) {
  const auto found = file.tensors.find(name);
  if (found == file.tensors.end()) return tokens;
  io::SafeTensors mask;  // as floats: not 0 is 1
  io::Array& given = mask.tensors[name] = found->second;
  const int64_t each = io::element_bytes(given.type), n = std::ssize(given.data) / each;
  std::vector<float> ones(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    const auto first = given.data.begin() + i * each;
    ones[static_cast<size_t>(i)] = std::any_of(first, first + each, [](std::byte b) { return b != std::byte{0}; }) ? 1 : 0;
  }
  given.type = io::ElementType::f32;
  given.data.resize(ones.size() * sizeof(float));
  std::memcpy(given.data.data(), ones.data(), given.data.size());
  ones = take_floats(path, mask, name, {tokens}, pick);
  const auto length = std::find(ones.begin(), ones.end(), 0.0f) - ones.begin();
  require(length > 0 && std::find(ones.begin() + length, ones.end(), 1.0f) == ones.end(), Status::format,
          "{}: {} must begin with ones, and have none behind its first 0", path, name);
  return length;
}

void check_example(const std::string& path, const io::SafeTensors& file, int64_t example) {
  const auto found = file.tensors.find("prompt_embeds");
  require(example == 0 || found == file.tensors.end() || found->second.shape.size() == 3, Status::shape,
          "--example: got {}, and prompt_embeds of {} is one sample", example, path);
}

std::string checked_compute(const Context& context, const std::string& text) {
  const std::string finest = dtype_name(finest_dtype(context));
  require(text != "f32" || finest == "f32", Status::unsupported, "--compute: {} takes {}", context.backend().name, finest);
  return text.empty() ? finest : text;
}

std::unique_ptr<video::Engine> make_engine(const Context& context, const std::string& compute) {
  return video::make_engine(context, compute == "bf16" ? DType::bf16 : DType::f32);
}

void read_rgb_inputs(const VideoInputs& options, const std::string& folder, const video::Notes& notes,
                     const video::ModelConfig& config, const std::array<int64_t, 3>& size, video::Request& request) {
  const std::string examples = folder + "/examples.safetensors";
  const std::string path = options.condition.empty() ? examples : options.condition;
  const bool needs_file = notes.prompts || options.image.empty();
  const io::SafeTensors file = needs_file ? io::read_safetensors(path) : io::SafeTensors{};
  if (needs_file) check_example(path, file, options.example);
  request.prompt.text = notes.prompts ? take_floats(path, file, "prompt_embeds", {-1, config.text_dim}, options.example)
                                      : std::vector<float>(static_cast<size_t>(config.text_dim));
  const int64_t guides = config.condition_channels - video::kRgbChannels;
  require(guides >= 1 && guides <= video::kMostGuides && config.latent_channels == video::kRgbChannels, Status::format,
          "{}: scope.json says rgb, which takes 25 to 28 channels and gives 12; config.json says {} and {}", folder,
          config.latent_channels + config.condition_channels, config.latent_channels);
  io::Image first;
  if (!options.image.empty()) {
    first = io::read_png(options.image);
  } else {
    const auto truth = file.tensors.find("truth");
    require(truth != file.tensors.end() && truth->second.type == io::ElementType::u8 && truth->second.shape.size() == 5 &&
                truth->second.shape[4] == 3 && truth->second.shape[1] >= 1,
            Status::invalid_argument, "--image: {} holds no frames, so a first frame is needed", path);
    const auto& shape = truth->second.shape;
    require(options.example < shape[0], Status::shape, "--example: got {}, {} holds {} clips", options.example, path,
            shape[0]);
    first = {shape[2], shape[3], {}};
    first.rgb.resize(static_cast<size_t>(shape[2] * shape[3] * 3));
    const auto at = static_cast<size_t>(options.example * shape[1]) * first.rgb.size();
    std::memcpy(first.rgb.data(), truth->second.data.data() + at, first.rgb.size());
  }
  try {
    request.condition = video::first_frame_condition(first, size, guides);
  } catch (const Error& error) {
    fail(error.status(), "{}: {}", options.image.empty() ? "--image (not given; the example's is used)" : options.image,
         error.what());
  }
}

namespace {

ModelQuery query_of(const video::ModelConfig& config, bool two_experts) {
  ModelQuery query{.layers = config.layers,
                   .heads = config.heads,
                   .dim = config.head_dim,
                   .from_image = config.condition_channels > 0 || config.needs_first_frame,
                   .experts = two_experts ? 2 : 1};
  require(config.rope.size() == 3, Status::internal, "rope: got {} ranges, expected 3", config.rope.size());
  std::copy_n(config.rope.begin(), 3, query.rope);
  return query;
}

}  // namespace

const Model* find_known(const std::string& name, const video::ModelConfig& config, bool two_experts) {
  if (name == "none") return nullptr;
  if (!name.empty()) return &find_model(name);
  const ModelFit fit = fit_model(query_of(config, two_experts));
  if (fit.model != nullptr) {
    fmt::print("config.json fits {}; --known NAME takes another's settings, --known none takes none\n", fit.why);
  }
  return fit.model;
}

namespace {

Settings row_settings(const Model& model, const Method& method) {
  Settings settings = method.settings();
  apply_model(model, settings);
  return settings;
}

}  // namespace

std::string known_text(const Model& model, bool named, const video::ModelConfig& config, const Settings& settings) {
  std::string text = fmt::format("known model {}, {}:", model.name, named ? "as named" : "by config.json");
  if (!same_shape(model, query_of(config, false))) {
    text = fmt::format("known model {}, as named, though it has {} layers x {} heads and config.json {} x {}:", model.name,
                       model.layers, model.heads, config.layers, config.heads);
  }
  const Settings row = row_settings(model, *settings.method);
  for (const Setting* setting : settings_of_models(*settings.method)) {
    const std::string own = setting->get(row), used = setting->get(settings);
    text += fmt::format(" {}={}", setting->name, used);
    if (used != own) text += fmt::format(" (given; its own: {})", own);
  }
  return text;
}

nlohmann::ordered_json known_json(const Model* model, const Settings& settings) {
  if (model == nullptr) return nullptr;
  const Settings row = row_settings(*model, *settings.method);
  nlohmann::ordered_json out{{"model", model->name}, {"settings", nlohmann::ordered_json::object()}};
  for (const Setting* setting : settings_of_models(*settings.method)) out["settings"][setting->name] = setting->get(row);
  return out;
}

video::Schedule schedule_of(const video::Folder& folder, const video::Notes& notes) {
  return folder.schedule.value_or(video::Schedule{video::Sampler::euler, notes.shift});
}

int64_t count_passes(const video::Request& request, int64_t first_step) {
  int64_t passes = 0;
  for (const int64_t expert : experts_from(request, first_step)) {
    passes += video::guidance_of(request, expert) == 1 ? 1 : 2;
  }
  return passes;
}

bool keeps_both(const std::string& experts, const video::Folder& folder, const video::Request& request,
                const video::Engine& engine) {
  bool both = experts == "both";
  std::string why;
  if (experts == "auto" && !engine.context.host()) {
    const int64_t needed = video::two_experts_bytes(folder, request, engine), free = engine.memory().free;
    both = needed <= free;
    why = fmt::format(": both take up to {:.1f} GB of the {:.1f} GB that are free", static_cast<double>(needed) / 1e9,
                      static_cast<double>(free) / 1e9);
  }
  fmt::print("{}{}\n", both ? "both experts in memory" : "one expert in memory at a time", why);
  return both;
}

void Transformers::keep(const video::Request& request, int64_t first_step) {
  for (const int64_t expert : experts_from(request, first_step)) kept_[static_cast<size_t>(expert)] = open(expert);
}

std::shared_ptr<const video::Model> Transformers::open(int64_t expert) const {
  const auto i = static_cast<size_t>(expert);
  return kept_[i] ? kept_[i] : video::open_model(folder_.transformers[i], engine_);
}

nlohmann::ordered_json seconds_json(const video::Sample& sample) {
  double dense = 0, sparse = 0, selection = 0;
  for (const auto& call : sample.calls) {
    const CallStats& s = call.stats;
    if (s.reason == Reason::sparse) {
      sparse += s.attend;
      selection += s.total - s.attend;
    } else {
      dense += s.total;
    }
  }
  return {{"total", sample.seconds},
          {"dense_prefix", dense},
          {"sparse_attention", sparse},
          {"selection", selection},
          {"rest", sample.seconds - dense - sparse - selection}};
}

double mean_density(const video::Sample& sample) {
  double sum = 0;
  int64_t n = 0;
  for (const auto& call : sample.calls) {
    if (call.stats.reason != Reason::sparse) continue;
    sum += call.stats.density;
    ++n;
  }
  return n == 0 ? 1.0 : sum / static_cast<double>(n);
}

}  // namespace scope::cli
