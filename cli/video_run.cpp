// Finds a model and what is known of it, and sums up a run.
#include "video_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <set>

#include "io/file.h"
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

std::string checked_compute(const Context& context, const std::string& text) {
  const std::string finest = dtype_name(finest_dtype(context));
  require(text != "f32" || finest == "f32", Status::unsupported, "--compute: {} takes {}", context.backend().name, finest);
  return text.empty() ? finest : text;
}

std::unique_ptr<video::Engine> make_engine(const Context& context, const std::string& compute, const std::string& linear) {
  using video::LinearMode;
  const LinearMode mode = linear == "fp8"        ? LinearMode::fp8
                          : linear == "fp8-fast" ? LinearMode::fp8_fast
                                                 : LinearMode::plain;
  return video::make_engine(context, compute == "bf16" ? DType::bf16 : DType::f32, mode);
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

nlohmann::ordered_json calls_json(const video::Sample& sample, int64_t steps) {
  auto out = nlohmann::ordered_json::array();
  for (int64_t i = 0; i < steps; ++i) out.push_back(nlohmann::ordered_json::array());
  for (const auto& call : sample.calls) {
    const CallStats& s = call.stats;
    std::vector<int64_t> budgets;
    std::vector<double> densities;
    for (const HeadStats& head : call.heads) {
      budgets.push_back(head.head_budget);
      densities.push_back(head.density);
    }
    nlohmann::ordered_json entry{{"density", s.density},
                                 {"head_density", densities},
                                 {"k_head", budgets},
                                 {"dense", s.reason != Reason::sparse},
                                 {"attention_seconds", s.attend},
                                 {"selection_seconds", s.total - s.attend}};
    if (call.branch > 0) entry["branch"] = call.branch;
    out[static_cast<size_t>(call.step)].push_back(entry);
  }
  return out;
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
