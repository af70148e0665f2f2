// Reads prompts, images and conditions, and refuses what does not fit the model.
#include "video_inputs.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "io/png.h"
#include "video/media.h"
#include "video/weights.h"

namespace scope::cli {

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

void read_latent_inputs(const VideoInputs& inputs, double guidance, double guidance_2, const video::Folder& folder,
                        const video::ModelConfig& config, const std::array<int64_t, 3>& size, video::Request& request) {
  const std::string& path = inputs.condition;
  require(!path.empty(), Status::invalid_argument,
          "--condition: this model needs a .safetensors file with prompt_embeds and what else --help lists");
  require(inputs.image.empty(), Status::invalid_argument,
          "--image: this model's latents are a VAE's; put the encoded image into --condition");
  const io::SafeTensors file = io::read_safetensors(path);
  check_example(path, file, inputs.example);
  const auto prompt = [&](const std::string& name) {
    const std::string sign = name.starts_with("negative_") ? "negative_" : "";
    video::Prompt out;
    out.text = take_floats(path, file, name, {-1, config.text_dim}, inputs.example);
    if (config.text_tokens > 0) {
      const int64_t tokens = std::ssize(out.text) / config.text_dim;
      const int64_t length = prompt_length(path, file, sign + "prompt_attention_mask", tokens, inputs.example);
      out.text.resize(static_cast<size_t>(length * config.text_dim));
    }
    if (config.pooled_dim > 0) {
      out.pooled = take_floats(path, file, sign + "pooled_prompt_embeds", {config.pooled_dim}, inputs.example);
    }
    if (config.image_dim > 0) {
      // Two images may stand one after the other, as diffusers gives them.
      const auto& shape =
          file.tensors.contains("image_embeds") ? file.tensors.at("image_embeds").shape : std::vector<int64_t>{};
      const bool pair = shape.size() == 3 && shape[0] * shape[1] == config.image_tokens;
      out.image = pair ? video::to_f32(file.tensors.at("image_embeds"))
                       : take_floats(path, file, "image_embeds", {-1, config.image_dim}, inputs.example);
    }
    io::with_path(path, [&] { video::check_prompt(config, out); });
    return out;
  };
  request.prompt = prompt("prompt_embeds");
  request.guidance = guidance;
  const bool image = config.condition_channels > 0 || config.needs_first_frame;
  if (config.embeds_guidance) {
    request.prompt.guidance = guidance > 0 ? guidance : image ? 1.0 : 6.0;
    request.guidance = 1;
  }
  const bool negative = !config.embeds_guidance && file.tensors.contains("negative_prompt_embeds");
  if (guidance == 0) request.guidance = negative ? 5.0 : 1.0;
  request.guidance_2 = guidance_2 == 0 ? request.guidance : guidance_2;
  const bool guided = request.guidance != 1 || (request.boundary > 0 && request.guidance_2 != 1);
  if (guided) request.negative = prompt("negative_prompt_embeds");
  if (config.condition_channels > 0) {
    request.condition =
        take_floats(path, file, "condition", {config.condition_channels, size[0], size[1], size[2]}, inputs.example);
  }
  if (config.needs_first_frame || (folder.keeps_first_frame && file.tensors.contains("condition"))) {
    request.first_frame =
        take_floats(path, file, "condition", {config.latent_channels, 1, size[1], size[2]}, inputs.example);
  }
}

}  // namespace scope::cli
