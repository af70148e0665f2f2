// Per-model shapes, RoPE ranges and schedules.
#include "methods/models.h"

#include <algorithm>

#include "methods/methods.h"
#include "stages/choices.h"

namespace scope {

namespace {

constexpr Model::Svg2 kWanSvg2{300, 0.2};
constexpr Model::Svoo kWan21{0.90, 0.15, 0.20, 11, 40, 50};
constexpr Model::Svg2 kHunyuanSvg2{400, 0.1};
constexpr Model::Svoo kHunyuan{0.88, 0.05, 0.10, 6, 50, 50};

const Model kTable[] = {
    {"wan2.1-t2v-14b",
     "Wan2.1 T2V 14B, 81 frames at 720p",
     40,
     40,
     128,
     {44, 42, 42},
     {21, 45, 80},
     50,
     0.90,
     0.2,
     false,
     kWanSvg2,
     kWan21},
    {"wan2.1-i2v-14b",
     "Wan2.1 I2V 14B, 81 frames at 720p",
     40,
     40,
     128,
     {44, 42, 42},
     {21, 45, 80},
     40,
     0.90,
     0.2,
     false,
     {300, 0.35},
     {0.90, 0.10, 0.15, 9, 20, 40}},
    {"wan2.1-t2v-1.3b",
     "Wan2.1 T2V 1.3B, 81 frames at 480p",
     30,
     12,
     128,
     {44, 42, 42},
     {21, 30, 52},
     50,
     0.90,
     0.2,
     false,
     kWanSvg2,
     {0.90, 0.15, 0.20, 11, 20, 50}},
    {"wan2.1-14b-480p",
     "Wan2.1 14B, 81 frames at 480p",
     40,
     40,
     128,
     {44, 42, 42},
     {21, 30, 52},
     50,
     0.90,
     0.2,
     false,
     kWanSvg2,
     kWan21},
    {"wan2.1-14b-distilled",
     "Wan2.1 14B, 4- to 8-step variants, 480p: no dense prefix fits",
     40,
     40,
     128,
     {44, 42, 42},
     {21, 30, 52},
     4,
     0.90,
     0.0,
     false,
     {300, 0.0},
     kWan21},
    {"wan2.2-a14b",
     "Wan2.2 T2V A14B (each of its two transformers), 81 frames at 720p",
     40,
     40,
     128,
     {44, 42, 42},
     {21, 45, 80},
     40,
     0.90,
     0.2,
     false,
     kWanSvg2,
     {0.90, 0.20, 0.22, 9, 40, 40}},
    {"wan2.2-i2v-a14b",
     "Wan2.2 I2V A14B (each of its two transformers), 81 frames at 720p",
     40,
     40,
     128,
     {44, 42, 42},
     {21, 45, 80},
     40,
     0.90,
     0.2,
     false,
     kWanSvg2,
     {0.90, 0.20, 0.25, 9, 40, 40}},
    {"wan2.2-ti2v-5b",
     "Wan2.2 TI2V 5B, 121 frames at 720p",
     30,
     24,
     128,
     {44, 42, 42},
     {31, 22, 40},
     50,
     0.90,
     0.2,
     false,
     kWanSvg2,
     kWan21},
    {"hunyuanvideo-13b",
     "HunyuanVideo 13B, 129 frames at 720p, up to 256 text tokens",
     60,
     24,
     128,
     {16, 56, 56},
     {33, 45, 80},
     50,
     0.88,
     0.1,
     true,
     kHunyuanSvg2,
     kHunyuan},
    // Its shape is published, a schedule for sparse attention is not: that of HunyuanVideo.
    {"hunyuanvideo-1.5",
     "HunyuanVideo 1.5, 121 frames at 720p, up to 1,985 tokens of text and image",
     54,
     16,
     128,
     {16, 56, 56},
     {31, 45, 80},
     50,
     0.88,
     0.1,
     true,
     kHunyuanSvg2,
     kHunyuan},
    // Its shape is published, a schedule for sparse attention is not: that of Wan.
    {"cogvideox-5b",
     "CogVideoX and CogVideoX1.5 5B, 81 frames at 768p in the latter, up to 226 text tokens",
     42,
     48,
     64,
     {16, 24, 24},
     {11, 48, 85},
     50,
     0.90,
     0.2,
     false,
     kWanSvg2,
     kWan21},
};

}  // namespace

std::span<const Model> models_table() { return kTable; }

const Model& find_model(std::string_view name) {
  for (const Model& model : kTable) {
    if (name == model.name) return model;
  }
  fail(Status::invalid_argument, "model: there is no \"{}\"; there are {}", name, names(models_table(), ", "));
}

std::vector<const Model*> fitting_models(int64_t layers, int64_t heads, std::span<const int64_t> rope) {
  std::vector<const Model*> found;
  for (const Model& model : kTable) {
    if (model.layers == layers && model.heads == heads && std::ranges::equal(model.rope, rope)) found.push_back(&model);
  }
  return found;
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
