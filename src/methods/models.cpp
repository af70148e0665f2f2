// Per-model shapes, RoPE ranges and schedules, and which of them fits a transformer.
#include "methods/models.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "core/nearest.h"
#include "methods/methods.h"
#include "stages/choices.h"

namespace scope {

namespace {

constexpr Model::Svg2 kWanSvg2{.groups = 300, .dense_steps = 0.2};
constexpr Model::Svoo kWan21{.p = 0.90, .low = 0.15, .high = 0.20, .start = 11, .interval = 40, .steps = 50};
constexpr Model::Svg2 kHunyuanSvg2{.groups = 400, .dense_steps = 0.1};
constexpr Model::Svoo kHunyuan{.p = 0.88, .low = 0.05, .high = 0.10, .start = 6, .interval = 50, .steps = 50};

const Model kTable[] = {
    {.name = "wan2.1-t2v-14b",
     .help = "Wan2.1 T2V 14B, 81 frames at 720p",
     .layers = 40,
     .heads = 40,
     .dim = 128,
     .rope = {44, 42, 42},
     .grid = {21, 45, 80},
     .steps = 50,
     .rho = 0.90,
     .dense_steps = 0.2,
     .svg2 = kWanSvg2,
     .svoo = kWan21},
    {.name = "wan2.1-i2v-14b",
     .help = "Wan2.1 I2V 14B, 81 frames at 720p",
     .layers = 40,
     .heads = 40,
     .dim = 128,
     .rope = {44, 42, 42},
     .grid = {21, 45, 80},
     .from_image = true,
     .steps = 40,
     .rho = 0.90,
     .dense_steps = 0.2,
     .svg2 = {.groups = 300, .dense_steps = 0.35},
     .svoo = {.p = 0.90, .low = 0.10, .high = 0.15, .start = 9, .interval = 20, .steps = 40}},
    {.name = "wan2.1-t2v-1.3b",
     .help = "Wan2.1 T2V 1.3B, 81 frames at 480p",
     .layers = 30,
     .heads = 12,
     .dim = 128,
     .rope = {44, 42, 42},
     .grid = {21, 30, 52},
     .steps = 50,
     .rho = 0.90,
     .dense_steps = 0.2,
     .svg2 = kWanSvg2,
     .svoo = {.p = 0.90, .low = 0.15, .high = 0.20, .start = 11, .interval = 20, .steps = 50}},
    {.name = "wan2.1-14b-480p",
     .help = "Wan2.1 14B, 81 frames at 480p",
     .layers = 40,
     .heads = 40,
     .dim = 128,
     .rope = {44, 42, 42},
     .grid = {21, 30, 52},
     .steps = 50,
     .rho = 0.90,
     .dense_steps = 0.2,
     .svg2 = kWanSvg2,
     .svoo = kWan21},
    {.name = "wan2.1-14b-distilled",
     .help = "Wan2.1 14B, variants of 4 to 8 steps, 480p: too few steps for a dense prefix",
     .layers = 40,
     .heads = 40,
     .dim = 128,
     .rope = {44, 42, 42},
     .grid = {21, 30, 52},
     .steps = 4,
     .rho = 0.90,
     .dense_steps = 0.0,
     .svg2 = {.groups = 300, .dense_steps = 0.0},
     .svoo = kWan21},
    {.name = "wan2.2-a14b",
     .help = "Wan2.2 T2V A14B (each of its two transformers), 81 frames at 720p",
     .layers = 40,
     .heads = 40,
     .dim = 128,
     .rope = {44, 42, 42},
     .grid = {21, 45, 80},
     .experts = 2,
     .steps = 40,
     .rho = 0.90,
     .dense_steps = 0.2,
     .svg2 = kWanSvg2,
     .svoo = {.p = 0.90, .low = 0.20, .high = 0.22, .start = 9, .interval = 40, .steps = 40}},
    {.name = "wan2.2-i2v-a14b",
     .help = "Wan2.2 I2V A14B (each of its two transformers), 81 frames at 720p",
     .layers = 40,
     .heads = 40,
     .dim = 128,
     .rope = {44, 42, 42},
     .grid = {21, 45, 80},
     .from_image = true,
     .experts = 2,
     .steps = 40,
     .rho = 0.90,
     .dense_steps = 0.2,
     .svg2 = kWanSvg2,
     .svoo = {.p = 0.90, .low = 0.20, .high = 0.25, .start = 9, .interval = 40, .steps = 40}},
    {.name = "wan2.2-ti2v-5b",
     .help = "Wan2.2 TI2V 5B, 121 frames at 720p",
     .layers = 30,
     .heads = 24,
     .dim = 128,
     .rope = {44, 42, 42},
     .grid = {31, 22, 40},
     .steps = 50,
     .rho = 0.90,
     .dense_steps = 0.2,
     .svg2 = kWanSvg2,
     .svoo = kWan21},
    {.name = "hunyuanvideo-13b",
     .help = "HunyuanVideo 13B, 129 frames at 720p, up to 256 text tokens",
     .layers = 60,
     .heads = 24,
     .dim = 128,
     .rope = {16, 56, 56},
     .grid = {33, 45, 80},
     .steps = 50,
     .rho = 0.88,
     .dense_steps = 0.1,
     .warm_prefix = true,
     .svg2 = kHunyuanSvg2,
     .svoo = kHunyuan},
    // Its shape is published, a schedule for sparse attention is not: that of HunyuanVideo.
    {.name = "hunyuanvideo-1.5",
     .help = "HunyuanVideo 1.5, 121 frames at 720p, up to 1,985 tokens of text and image",
     .layers = 54,
     .heads = 16,
     .dim = 128,
     .rope = {16, 56, 56},
     .grid = {31, 45, 80},
     .steps = 50,
     .rho = 0.88,
     .dense_steps = 0.1,
     .warm_prefix = true,
     .svg2 = kHunyuanSvg2,
     .svoo = kHunyuan},
    // The shapes from here on are published, a schedule for sparse attention is not: that of Wan.
    {.name = "cogvideox-5b",
     .help = "CogVideoX 5B and CogVideoX1.5 5B (81 frames at 768p), up to 226 text tokens",
     .layers = 42,
     .heads = 48,
     .dim = 64,
     .rope = {16, 24, 24},
     .grid = {11, 48, 85},
     .steps = 50,
     .rho = 0.90,
     .dense_steps = 0.2,
     .svg2 = kWanSvg2,
     .svoo = kWan21},
    // Channel i of a head turns with channel i + 48, and the last 32 do not turn: no ranges.
    {.name = "minimax-h3",
     .help = "MiniMax-H3, 124 frames at 768p, with text, audio and references beside the video",
     .layers = 50,
     .heads = 56,
     .dim = 128,
     .rope = {},
     .grid = {37, 24, 42},
     .steps = 50,
     .rho = 0.90,
     .dense_steps = 0.2,
     .svg2 = kWanSvg2,
     .svoo = kWan21},
    // The axes alternate over the channels of all heads: no ranges.
    {.name = "ltx-2",
     .help = "LTX-2, 121 frames at 1280x704",
     .layers = 48,
     .heads = 32,
     .dim = 128,
     .rope = {},
     .grid = {16, 22, 40},
     .steps = 30,
     .rho = 0.90,
     .dense_steps = 0.2,
     .svg2 = kWanSvg2,
     .svoo = kWan21},
};

bool said(const int64_t (&rope)[3]) { return rope[0] != 0 || rope[1] != 0 || rope[2] != 0; }
bool same_rope(const Model& model, const ModelQuery& query) {
  return !said(query.rope) || std::ranges::equal(model.rope, query.rope);
}
bool same(int64_t of_model, int64_t asked) { return asked == 0 || asked == of_model; }

// What is compared, the weightiest first: the shape, then how many transformers there are, then what the video starts from.
std::array<bool, 6> likeness(const Model& model, const ModelQuery& query) {
  return {same_rope(model, query),    same(model.layers, query.layers), same(model.heads, query.heads),
          same(model.dim, query.dim), model.experts == query.experts,   model.from_image == query.from_image};
}

std::string shape_text(int64_t layers, int64_t heads, int64_t dim) {
  std::string text = layers == 0 ? "" : fmt::format("{} layers", layers);
  if (heads != 0) text += fmt::format("{}{} heads", text.empty() ? "" : " x ", heads);
  if (dim != 0) text += fmt::format("{} of {} channels", heads != 0 ? "" : text.empty() ? "heads" : " x heads", dim);
  return text;
}

std::string kind_text(bool from_image, int64_t experts) {
  return fmt::format("from {}, {}", from_image ? "an image" : "text", experts == 2 ? "two transformers" : "one transformer");
}

}  // namespace

std::span<const Model> models_table() { return kTable; }

const Model& find_model(std::string_view name) {
  for (const Model& model : kTable) {
    if (name == model.name) return model;
  }
  fail(Status::invalid_argument, "model: there is no \"{}\"{}; there are {}", name, did_you_mean_row(name, models_table()),
       names(models_table(), ", "));
}

bool same_shape(const Model& model, const ModelQuery& query) {
  return same_rope(model, query) && same(model.layers, query.layers) && same(model.heads, query.heads) &&
         same(model.dim, query.dim);
}

ModelFit fit_model(const ModelQuery& query) {
  for (const auto& [name, value] : {std::pair{"layers", query.layers}, {"heads", query.heads}, {"dim", query.dim}}) {
    require(value >= 0, Status::invalid_argument, "{}: got {}, expected 0 (not said) or more", name, value);
  }
  for (const int64_t n : query.rope) {
    require(n >= 0, Status::invalid_argument, "rope: got a range of {} channels, expected 0 (not said) or more", n);
  }
  require(query.experts == 1 || query.experts == 2, Status::invalid_argument, "experts: got {}, expected 1 or 2",
          query.experts);
  const Model* best = nullptr;
  for (const Model& model : kTable) {
    if (!std::string_view(model.name).starts_with(query.family)) continue;
    if (best == nullptr || likeness(*best, query) < likeness(model, query)) best = &model;
  }
  const std::string whose = query.family.empty() ? "" : fmt::format(" of family \"{}\"", query.family);
  if (best == nullptr) return {.why = fmt::format("there is no known model{}", whose)};
  if (!same_shape(*best, query)) {
    std::string why = fmt::format("no known model{} has {}", whose, shape_text(query.layers, query.heads, query.dim));
    if (said(query.rope)) why += fmt::format("{}RoPE {}", why.ends_with(' ') ? "" : " with ", fmt::join(query.rope, ","));
    if (!query.nearest) return {.why = why};
    return {.model = best, .why = fmt::format("{}; {} is the most alike", why, best->name)};
  }
  std::string why = fmt::format("{}: {}, {}", best->name, shape_text(best->layers, best->heads, best->dim),
                                kind_text(best->from_image, best->experts));
  if (best->from_image != query.from_image || best->experts != query.experts) {
    why += fmt::format("; none of this shape is {}", kind_text(query.from_image, query.experts));
  }
  std::vector<const char*> later;  // as much alike
  for (const Model& model : std::span(best + 1, std::end(kTable))) {
    const bool asked = std::string_view(model.name).starts_with(query.family);
    if (asked && likeness(model, query) == likeness(*best, query)) later.push_back(model.name);
  }
  if (!later.empty()) {
    why += fmt::format("; {} fit{} as well, later in the table", fmt::join(later, ", "), later.size() == 1 ? "s" : "");
  }
  return {.model = best, .exact = true, .why = why};
}

std::vector<const Setting*> settings_of_models(const Method& method) {
  std::vector<const Setting*> found;
  const Settings plain = method.settings();
  for (const Setting& setting : settings_table()) {
    const bool changes = std::ranges::any_of(kTable, [&](const Model& model) {
      Settings settings = plain;
      apply_model(model, settings);
      return setting.get(settings) != setting.get(plain);
    });
    if (changes) found.push_back(&setting);
  }
  return found;
}

void apply_model(const Model& model, Settings& settings) {
  settings.dense_layers = 1;
  settings.dense_steps = model.dense_steps;
  settings.warm_prefix = model.warm_prefix;
  settings.layers = model.layers;
  settings.method->apply_model(model, settings);
}

}  // namespace scope
