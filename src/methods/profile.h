// An offline profile of a model: how dense exact attention is at each step, layer and head.
#pragma once

#include <istream>
#include <map>
#include <string>
#include <tuple>

#include "core/error.h"

namespace scope {

struct Profile {
  std::string path;
  int64_t heads = 0;                                                  // of every step and layer that has an entry
  int64_t steps = 0;                                                  // up to the last that has one
  std::map<std::tuple<int64_t, int64_t, int64_t>, double> densities;  // by step, layer and head
};

// CSV: a line step,layer,head,density, then one such line per head, all counted from 0; or the files of SVOO's authors,
// whose first line is Step,Layer,Head,Sparsity and whose steps are counted from 1. Throws Status::io, or Status::format with
// the line; a step and layer that lacks some of the heads is refused.
Profile read_profile(const std::string& path);
// The same from what is open; `path` is for messages.
Profile parse_profile(std::istream& file, const std::string& path);
// As the first of the two, sorted.
std::string profile_csv(const Profile& profile);

// The maximum of the entry, if there is one, and `density`.
void raise_density(Profile& profile, int64_t step, int64_t layer, int64_t head, double density);
// The same with every entry of another. Throws Status::shape unless both have as many heads.
void merge_profile(Profile& profile, const Profile& other);

// Throws Status::shape unless the profile has `heads` heads and, where `layers` is not 0, no layer past them and every layer
// from `first_layer` on at some step.
void check_profile(const Profile& profile, int64_t heads, int64_t layers, int64_t first_layer);

}  // namespace scope
