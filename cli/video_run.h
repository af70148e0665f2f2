// What the commands that generate share: the model's folder, the inputs of the bundled model, and the figures of a run.
#pragma once

#include <array>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "methods/models.h"
#include "video/folder.h"
#include "video/media.h"
#include "video/sampler.h"

namespace scope::cli {

struct VideoInputs {
  std::string image, condition;  // files; empty: the model's examples
  int64_t example = 0;           // which sample of the condition
};

// A folder as it is, or the name of a bundled model; with `shapes`, of one whose config.json is bundled alone too.
std::string find_model_folder(const std::string& name, bool shapes = false);
// A float tensor of a file; `shape` has -1 where any size will do. A leading 1 or, with `pick`, a batch of which one is
// taken, may stand before it.
std::vector<float> take_floats(const std::string& path, const io::SafeTensors& file, const std::string& name,
                               const std::vector<int64_t>& shape, int64_t pick);
// How many tokens of a prompt are not padding: the ones of a mask [tokens] of whole numbers or floats, all of them first;
// all tokens where the file has no such mask. A batch as in take_floats.
int64_t prompt_length(const std::string& path, const io::SafeTensors& file, const std::string& name, int64_t tokens,
                      int64_t pick);
// Refuses an example other than 0 of a file that holds one sample.
void check_example(const std::string& path, const io::SafeTensors& file, int64_t example);
// The value of --compute, f32 or bf16; empty: the finest that the backend takes.
std::string checked_compute(const Context& context, const std::string& text);
std::unique_ptr<video::Engine> make_engine(const Context& context, const std::string& compute);
// What the bundled model is conditioned on: the first frame and the motion tokens of an example, or of the user's files.
void read_rgb_inputs(const VideoInputs& options, const std::string& folder, const video::Notes& notes,
                     const video::ModelConfig& config, const std::array<int64_t, 3>& size, video::Request& request);

// What other models are conditioned on, from the tensors of the condition. guidance, guidance_2: 0 takes what
// `scope generate` does.
void read_latent_inputs(const VideoInputs& inputs, double guidance, double guidance_2, const video::Folder& folder,
                        const video::ModelConfig& config, const std::array<int64_t, 3>& size, video::Request& request);

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
// Mean over the calls that ran sparse; 1 where none did.
double mean_density(const video::Sample& sample);

}  // namespace scope::cli
