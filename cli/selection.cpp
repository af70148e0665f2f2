// Reads a selection and counts what it keeps.
#include "selection.h"

#include <bit>
#include <cstring>
#include <filesystem>

#include "core/numeric.h"
#include "io/safetensors.h"

namespace scope::cli {

namespace {

using Shape4 = std::vector<int64_t>;

std::string shape_text(const Shape4& shape) { return fmt::format("[{}]", io::join(shape)); }

// A tensor of 32-bit integers. Its first dimension, of samples, may be left out where there is one sample.
template <class T>
std::vector<T> take(const io::SafeTensors& file, const GivenSelection& of, const char* name, Shape4 shape) {
  const io::Array& array = file.tensors.at(name);
  const bool is_integers = array.type == io::ElementType::i32 || array.type == io::ElementType::u32;
  Shape4 found = array.shape;
  if (found.size() + 1 == shape.size() && shape[0] == 1) found.insert(found.begin(), 1);
  require(is_integers && found == shape, Status::shape, "{}: {}: got {} {}, expected 32-bit integers {}", of.path, name,
          io::element_name(array.type), shape_text(array.shape), shape_text(shape));
  std::vector<T> values(array.data.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), array.data.data(), array.data.size());
  return values;
}

}  // namespace

GivenSelection name_selection(const std::string& text) {
  const size_t equals = text.find('=');
  GivenSelection selection{
      .name = equals == std::string::npos ? std::filesystem::path(text).stem().string() : text.substr(0, equals),
      .path = equals == std::string::npos ? text : text.substr(equals + 1)};
  require(!selection.name.empty() && !selection.path.empty(), Status::invalid_argument,
          "--selection: got \"{}\", expected FILE or NAME=FILE", text);
  return selection;
}

void read_selection(GivenSelection& selection, const Input& input) {
  const Qkv& qkv = input.qkv;
  const io::SafeTensors file = io::read_safetensors(selection.path);
  for (const char* name : {"labels", "mask"}) {
    require(file.tensors.contains(name), Status::format, "{}: there is no tensor \"{}\"; expected labels and mask",
            selection.path, name);
  }
  const Shape4& mask = file.tensors.at("mask").shape;
  require(mask.size() >= 2, Status::shape, "{}: mask: got {}, expected [heads, groups, words]", selection.path,
          shape_text(mask));
  selection.groups = mask[mask.size() - 2];
  require(selection.groups >= 1 && selection.groups <= qkv.q_tokens, Status::shape,
          "{}: mask: got {} groups, expected 1..{}, the tokens of q", selection.path, selection.groups, qkv.q_tokens);
  const int64_t words = mask_words(qkv.k_tokens);
  selection.labels = take<int32_t>(file, selection, "labels", {qkv.batch, qkv.heads, qkv.q_tokens});
  selection.mask = take<uint32_t>(file, selection, "mask", {qkv.batch, qkv.heads, selection.groups, words});
  if (file.tensors.contains("keep")) selection.keep = take<uint32_t>(file, selection, "keep", {qkv.batch, words});
}

double GivenSelection::density(const Input& input) const {
  const Qkv& qkv = input.qkv;
  const int64_t words = mask_words(qkv.k_tokens);
  double sum = 0;
  for (int64_t head = 0; head < qkv.batch * qkv.heads; ++head) {
    const int64_t b = head / qkv.heads;
    int64_t keys = input.k_lengths.empty() ? qkv.k_tokens : input.k_lengths[static_cast<size_t>(b)];
    for (int64_t w = 0; w < words && !keep.empty(); ++w) keys -= std::popcount(keep[static_cast<size_t>(b * words + w)]);
    std::vector<int64_t> counts(static_cast<size_t>(groups));
    for (int64_t i = 0; i < groups * words; ++i) {
      counts[static_cast<size_t>(i / words)] += std::popcount(mask[static_cast<size_t>(head * groups * words + i)]);
    }
    int64_t pairs = 0, queries = 0;
    for (int64_t i = 0; i < qkv.q_tokens; ++i) {
      const int32_t label = labels[static_cast<size_t>(head * qkv.q_tokens + i)];
      if (label < 0) continue;
      pairs += counts[static_cast<size_t>(label)];
      ++queries;
    }
    const double all = static_cast<double>(queries) * static_cast<double>(keys);
    sum += all > 0 ? static_cast<double>(pairs) / all : 0;
  }
  return sum / static_cast<double>(qkv.batch * qkv.heads);
}

}  // namespace scope::cli
