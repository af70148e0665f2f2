// What must hold between the files of a pipeline's folder.
#include "video/folder.h"

#include <algorithm>

#include "video/fields.h"
#include "video/model.h"
#include "video/weights.h"

namespace scope::video {

namespace {

using nlohmann::json;

// The fields that change a scheduler's function with the only value that is native here, and those that then do nothing.
struct Native {
  const char* class_name;
  const char* shift;
  std::vector<std::pair<const char*, json>> fields;
  std::vector<const char*> needed;  // of these fields: absent ones are something else
  std::vector<const char*> idle;
};

const Native& native(Sampler sampler) {
  static const Native euler = {"FlowMatchEulerDiscreteScheduler",
                               "shift",
                               {{"num_train_timesteps", 1000},
                                {"use_dynamic_shifting", false},
                                {"shift_terminal", nullptr},
                                {"use_karras_sigmas", false},
                                {"use_exponential_sigmas", false},
                                {"use_beta_sigmas", false},
                                {"invert_sigmas", false},
                                {"stochastic_sampling", false}},
                               {},
                               {"base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len", "time_shift_type"}};
  static const Native unipc = {
      "UniPCMultistepScheduler",
      "flow_shift",
      {{"prediction_type", "flow_prediction"},
       {"use_flow_sigmas", true},
       {"num_train_timesteps", 1000},
       {"solver_order", 2},
       {"solver_type", "bh2"},
       {"predict_x0", true},
       {"lower_order_final", true},
       {"final_sigmas_type", "zero"},
       {"disable_corrector", json::array()},
       {"solver_p", nullptr},
       {"thresholding", false},
       {"use_karras_sigmas", false},
       {"use_exponential_sigmas", false},
       {"use_beta_sigmas", false},
       {"use_dynamic_shifting", false},
       {"shift_terminal", nullptr}},
      {"prediction_type", "use_flow_sigmas"},
      {"beta_start", "beta_end", "beta_schedule", "trained_betas", "rescale_betas_zero_snr", "dynamic_thresholding_ratio",
       "sample_max_value", "timestep_spacing", "steps_offset", "time_shift_type", "sigma_min", "sigma_max"}};
  return sampler == Sampler::unipc ? unipc : euler;
}

// [library, class] of a component that is there, [null, null] or nothing of one that is not.
bool has_component(const json& index, const char* name) {
  const auto found = index.find(name);
  return found != index.end() && found->is_array() && found->size() == 2 && (*found)[1].is_string();
}

// The last part of where a transformer says that it was loaded from; empty: it does not.
std::string origin(const std::string& folder) {
  return read_config(folder, [](std::string_view text) -> std::string {
    const json config = parse_json(text);
    const auto found = config.find("_name_or_path");
    if (found == config.end() || !found->is_string()) return "";
    const std::string& path = found->get_ref<const std::string&>();
    return path.substr(path.find_last_of('/') + 1);
  });
}

void check_experts(const std::string& first, const std::string& second) {
  require(origin(first) != "transformer_2" || origin(second) != "transformer", Status::format,
          "{} and {}: their config.json say that they come from transformer_2 and transformer; expected them the other way "
          "round",
          first, second);
  require(read_model_config(first) == read_model_config(second), Status::format,
          "{} and {}: config.json of one says another shape than that of the other; expected two experts of one shape",
          first, second);
  const auto expected = read_shapes(first), got = read_shapes(second);
  for (const auto& [name, shape] : expected) {
    const auto found = got.find(name);
    require(found != got.end(), Status::format, "{}: tensor '{}' is missing, and {} has it", second, io::printable(name),
            first);
    require(found->second == shape, Status::format, "{}: tensor '{}' has shape [{}], and [{}] in {}", second,
            io::printable(name), io::join(found->second), io::join(shape), first);
  }
  for (const auto& item : got) {
    require(expected.contains(item.first), Status::format, "{}: tensor '{}' is not in {}", second, io::printable(item.first),
            first);
  }
}

}  // namespace

Schedule parse_scheduler(std::string_view text) {
  const json config = parse_json(text);
  require(config.is_object(), Status::format, "not a JSON object");
  Fields fields(text);
  const size_t which = fields.text("_class_name", {native(Sampler::euler).class_name, native(Sampler::unipc).class_name});
  Schedule out{which == 0 ? Sampler::euler : Sampler::unipc};
  const Native& known = native(out.sampler);
  fields.real(known.shift, 1e-3, 1e3, out.shift);
  for (const char* name : known.needed) {
    require(config.contains(name), Status::format, "{}: got nothing, expected it of a flow", name);
  }
  for (const auto& item : config.items()) {
    const std::string& name = item.key();
    const auto is_it = [&](const auto& field) { return name == field; };
    if (name.starts_with('_') || name == known.shift || std::any_of(known.idle.begin(), known.idle.end(), is_it)) continue;
    const auto field =
        std::find_if(known.fields.begin(), known.fields.end(), [&](const auto& each) { return name == each.first; });
    require(field != known.fields.end(), Status::format, "'{}': unknown key, and it may change the sampler",
            io::printable(name));
    require(item.value() == field->second, Status::format, "{}: got {}, expected {}", name, shown(item.value()),
            shown(field->second));
  }
  return out;
}

ModelIndex parse_model_index(std::string_view text) {
  const json index = parse_json(text);
  require(index.is_object(), Status::format, "not a JSON object");
  ModelIndex out;
  out.two_experts = has_component(index, "transformer_2");
  require(has_component(index, "transformer"), Status::format, "transformer: got nothing{}",
          out.two_experts ? ", and transformer_2 alone lacks the noisy steps" : ", expected the component of that name");
  for (const auto& item : index.items()) {
    const json& value = item.value();
    if (item.key().starts_with('_') || value.is_array()) continue;  // the components
    if (item.key() == "boundary_ratio") {
      if (value.is_null()) continue;
      require(value.is_number() && value.get<double>() > 0 && value.get<double>() < 1, Status::format,
              "boundary_ratio: got {}, expected a number between 0 and 1", shown(value));
      out.boundary = value.get<double>();
    } else if (item.key() == "expand_timesteps") {
      require(value.is_boolean(), Status::format, "expand_timesteps: got {}, expected true or false", shown(value));
      out.expand_timesteps = value.get<bool>();
    } else {
      fail(Status::format, "'{}': unknown key, and it may change the pipeline", io::printable(item.key()));
    }
  }
  require(out.two_experts == (out.boundary > 0), Status::format, "{}",
          out.two_experts ? "transformer_2: there is no boundary_ratio, which says when it takes over"
                          : "boundary_ratio: there is no transformer_2, which takes over there");
  return out;
}

Folder read_folder(const std::string& folder) {
  Folder out{{folder}, 0, false, {}};
  const std::string index_path = folder + "/model_index.json";
  if (!io::exists(index_path)) return out;
  const ModelIndex index = io::with_path(index_path, [&] { return parse_model_index(read_text(index_path)); });
  out.transformers = {folder + "/transformer"};
  if (index.two_experts) {
    out.boundary = index.boundary * 1000;
    out.transformers.push_back(folder + "/transformer_2");
    check_experts(out.transformers[0], out.transformers[1]);
  }
  out.keeps_first_frame = index.expand_timesteps;
  require(!out.keeps_first_frame || read_model_config(out.transformers[0]).condition_channels == 0, Status::format,
          "{}: expand_timesteps is for a transformer without channels beside the latent's, and this one has {}", folder,
          read_model_config(out.transformers[0]).condition_channels);
  const std::string scheduler = folder + "/scheduler/scheduler_config.json";
  if (io::exists(scheduler)) {
    out.schedule = io::with_path(scheduler, [&] { return parse_scheduler(read_text(scheduler)); });
  }
  return out;
}

}  // namespace scope::video
