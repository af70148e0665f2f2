// The checkpoint of a generation: a .safetensors file that names its run, with all that the run needs to go on.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "video/folder.h"
#include "video_run.h"

namespace scope::cli {

// What makes a run the same to the last bit: names and values, those first that users gave.
using RunIdentity = std::vector<std::pair<std::string, std::string>>;

// seed: empty where the noise comes from a file. A model is known by its JSON and by samples of its weights.
RunIdentity identify_run(const video::Folder& folder, const video::Request& request, const std::string& seed,
                         const Context& context, const std::string& compute);

void write_checkpoint(const std::string& path, const RunIdentity& run, video::Snapshot snapshot);
// Nothing where there is no file. A checkpoint of another run is refused, with what differs. Of earlier calls it has what
// run.json says of them.
std::optional<video::Snapshot> read_checkpoint(const std::string& path, const RunIdentity& run, int64_t steps);

// 16 digits that name these numbers, bit for bit.
std::string hash_of(std::initializer_list<const std::vector<float>*> parts);

}  // namespace scope::cli
