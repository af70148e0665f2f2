// What the commands that generate share: the model's folder, known models, engines, and the figures of a run.
#pragma once

#include <array>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "methods/models.h"
#include "video/folder.h"
#include "video/media.h"
#include "video/sampler.h"

namespace scope::cli {

// A folder as it is, or the name of a bundled model; with `shapes`, of one whose config.json is bundled alone too.
std::string find_model_folder(const std::string& name, bool shapes = false);
// The value of --compute, f32 or bf16; empty: the finest that the backend takes.
std::string checked_compute(const Context& context, const std::string& text);
// linear: plain, fp8 or fp8-fast.
std::unique_ptr<video::Engine> make_engine(const Context& context, const std::string& compute,
                                           const std::string& linear = "plain");
// Sampler and shift of the folder's scheduler; without one, Euler with the model's shift.
video::Schedule schedule_of(const video::Folder& folder, const video::Notes& notes);
// Forward passes of a request from a step on.
int64_t count_passes(const video::Request& request, int64_t first_step = 0);

// Whether both experts of a folder are to be in memory, by the value of --experts; auto: on a device with room for them and
// for the request. Says so on stdout.
bool keeps_both(const std::string& experts, const video::Folder& folder, const video::Request& request,
                const video::Engine& engine);

// The transformers of a folder on an engine. One that is not kept is read when it is asked for.
class Transformers {
 public:
  Transformers(const video::Folder& folder, video::Engine& engine)
      : folder_(folder), engine_(engine), kept_(folder.transformers.size()) {}
  // Reads all that run in a request's steps from one on.
  void keep(const video::Request& request, int64_t first_step = 0);
  video::OpenModel opener() const {
    return [this](int64_t expert) { return open(expert); };
  }

 private:
  std::shared_ptr<const video::Model> open(int64_t expert) const;

  const video::Folder& folder_;
  video::Engine& engine_;
  std::vector<std::shared_ptr<const video::Model>> kept_;
};

// The row of the known models that a run takes settings from: the one of that name, or without a name the first that
// fit_model finds of the folder's shape, which it says on stdout. Null for `none`, and where no row has the shape.
const Model* find_known(const std::string& name, const video::ModelConfig& config, bool two_experts = false);
// A line that names the row and every setting that it has for the method, as it is in the run.
std::string known_text(const Model& model, bool named, const video::ModelConfig& config, const Settings& settings);
// Its name and what it sets; null without one.
nlohmann::ordered_json known_json(const Model* model, const Settings& settings);

// Total, and its parts: calls that ran dense, attend and selection of the others, and the rest.
nlohmann::ordered_json seconds_json(const video::Sample& sample);
// Every call by its step.
nlohmann::ordered_json calls_json(const video::Sample& sample, int64_t steps);
// Mean over the calls that ran sparse; 1 where none did.
double mean_density(const video::Sample& sample);

}  // namespace scope::cli
