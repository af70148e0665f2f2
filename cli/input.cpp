// Reads q, k, v, and holds what a file says of them against the flags.
#include "input.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstring>
#include <limits>

#include "bounds.h"
#include "io/npy.h"
#include "io/safetensors.h"
#include "method.h"
#include "methods/models.h"
#include "parse.h"

namespace scope::cli {

namespace {

template <class T>
std::vector<T> take(io::SafeTensors& file, const char* name, io::ElementType type, const std::vector<int64_t>& shape) {
  const auto found = file.tensors.find(name);
  if (found == file.tensors.end()) return {};
  const io::Array& array = found->second;
  require(array.type == type && array.shape == shape, Status::shape, "{}: got {} [{}], expected {} [{}]", name,
          io::element_name(array.type), fmt::join(array.shape, ", "), io::element_name(type), fmt::join(shape, ", "));
  std::vector<T> values(array.data.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), array.data.data(), array.data.size());
  return values;
}

io::Array take_tensor(io::SafeTensors& file, const std::string& path, const char* name) {
  auto node = file.tensors.extract(name);
  require(!node.empty(), Status::format, "{}: there is no tensor \"{}\"; expected q, k and v", path, name);
  return std::move(node.mapped());
}

Qkv read_qkv(const InputFlags& flags, io::SafeTensors& file) {
  if (flags.path.empty()) {
    require(!flags.q.empty() && !flags.k.empty() && !flags.v.empty(), Status::invalid_argument,
            "input: expected a .safetensors file, or --q, --k and --v as .npy files");
    return make_qkv_input(io::read_npy(flags.q), io::read_npy(flags.k), io::read_npy(flags.v));
  }
  for (const auto& [name, file_of] :
       {std::pair<const char*, const std::string&>{"--q", flags.q}, {"--k", flags.k}, {"--v", flags.v}}) {
    require(file_of.empty(), Status::invalid_argument, "{}: got {} beside the input file {}; expected one or the other",
            name, file_of, flags.path);
  }
  file = io::read_safetensors(flags.path);
  io::Array q = take_tensor(file, flags.path, "q");
  io::Array k = take_tensor(file, flags.path, "k");
  return make_qkv_input(std::move(q), std::move(k), take_tensor(file, flags.path, "v"));
}

// A flag wins over the file's metadata.
std::string flag_or_metadata(const std::string& flag, const io::SafeTensors& file, const char* name) {
  if (!flag.empty()) return flag;
  const auto found = file.metadata.find(name);
  return found == file.metadata.end() ? "" : found->second;
}

Partition parse_subspaces(const std::string& text) {
  const auto bad = [&](const char* why) {
    fail(Status::invalid_argument, "subspaces: {}; expected JSON lists of channels such as [[0,1],[2,3]], got \"{}\"", why,
         text.substr(0, 80));
  };
  const auto json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_array() || json.empty()) bad("not a list");
  Partition partition;
  for (const auto& set : json) {
    if (!set.is_array()) bad("not a list of lists");
    auto& channels = partition.emplace_back();
    for (const auto& channel : set) {
      if (!channel.is_number_integer() || channel < 0 || channel > 100000) bad("a channel is not an index");
      channels.push_back(channel.get<int32_t>());
    }
  }
  return partition;
}

void describe(const InputFlags& flags, const std::string& model, const io::SafeTensors& file, Input& input) {
  Qkv& qkv = input.qkv;
  require(flags.text <= std::min(qkv.q_tokens, qkv.k_tokens), Status::shape, "--text: got {}, expected at most {} tokens",
          flags.text, std::min(qkv.q_tokens, qkv.k_tokens));
  input.grid = flag_or_metadata(flags.grid, file, "grid");
  if (!input.grid.empty()) {
    int64_t tokens = flags.text;
    int64_t product = 1;
    const auto along = parse_list("grid", input.grid, 'x');
    require(along.size() == 3, Status::invalid_argument, "grid: got {} numbers, expected TxHxW", along.size());
    for (const int64_t n : along) {
      require(n <= qkv.q_tokens && product <= qkv.q_tokens, Status::shape, "grid: got {}, expected the {} tokens of q",
              input.grid, qkv.q_tokens);
      product *= n;
    }
    tokens += product;
    require(tokens == qkv.q_tokens, Status::shape, "grid: {} has {} tokens, with {} of text {}, and q has {}", input.grid,
            product, flags.text, tokens, qkv.q_tokens);
  }
  require(flags.rope.empty() || flags.subspaces.empty(), Status::invalid_argument,
          "--rope: got {} beside --subspaces, which are the channel sets in its place", flags.rope);
  const std::string subspaces = flag_or_metadata(flags.subspaces, file, "subspaces");
  std::string rope = flag_or_metadata(flags.rope, file, "rope");
  if (rope.empty() && !model.empty() && find_model(model).has_rope()) {
    rope = fmt::format("{}", fmt::join(find_model(model).rope, ","));
  }
  if (!rope.empty()) {
    qkv.rope = parse_list("rope", rope, ',');
    require(qkv.rope.size() == 3, Status::invalid_argument,
            "rope: got \"{}\", expected T,H,W; any other channel sets are --subspaces", rope);
  }
  if (!subspaces.empty()) qkv.subspaces = parse_subspaces(subspaces);
}

// Text is the last tokens of every sample, and the file must not say otherwise.
void check_text(const Input& input) {
  for (const auto& [name, mask] :
       {std::pair<const char*, const std::vector<uint32_t>&>{"keep", input.keep}, {"dense_queries", input.dense_queries}}) {
    require(mask.empty(), Status::invalid_argument, "--text: the file marks its text itself, by its tensor {}", name);
  }
  const auto check_length = [](const char* name, const std::vector<int64_t>& lengths, int64_t tokens) {
    for (size_t b = 0; b < lengths.size(); ++b) {
      require(lengths[b] == tokens, Status::invalid_argument,
              "--text: the last tokens of sample {} are padding: the file's {} says {} of {}", b, name, lengths[b], tokens);
    }
  };
  check_length("q_lengths", input.q_lengths, input.qkv.q_tokens);
  check_length("k_lengths", input.k_lengths, input.qkv.k_tokens);
}

// The last `text` tokens are text: every query sees them, and they see everything.
std::vector<uint32_t> last_tokens(int64_t text, int64_t batch, int64_t tokens) {
  std::vector<uint32_t> bits(static_cast<size_t>(batch * mask_words(tokens)));
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t i = tokens - text; i < tokens; ++i) set_mask_bit(bits.data() + b * mask_words(tokens), i);
  }
  return bits;
}

}  // namespace

void InputFlags::add(CLI::App& app) {
  app.add_option("input", path, "a .safetensors file with q, k and v");
  app.add_option("--q", q, "q as .npy, instead of the input file");
  app.add_option("--k", k, "k as .npy");
  app.add_option("--v", v, "v as .npy");
  app.add_option("--grid", grid, "tokens along T, H and W, as TxHxW");
  app.add_option("--rope", rope, "channels along T, H and W, as T,H,W");
  app.add_option("--subspaces", subspaces, "channel sets as JSON lists; wins over the setting partition");
  app.add_option("--text", text, "the last N tokens are text: always kept as keys, dense as queries")
      ->check(whole(0, (int64_t{1} << 31) - 64));
}

Input InputFlags::read(const std::string& model) const {
  io::SafeTensors file;
  Input input{.qkv = read_qkv(*this, file)};
  describe(*this, model, file, input);
  const Qkv& qkv = input.qkv;
  input.q_lengths = take<int64_t>(file, "q_lengths", io::ElementType::i64, {qkv.batch});
  input.k_lengths = take<int64_t>(file, "k_lengths", io::ElementType::i64, {qkv.batch});
  input.keep = take<uint32_t>(file, "keep", io::ElementType::u32, {qkv.batch, mask_words(qkv.k_tokens)});
  input.dense_queries = take<uint32_t>(file, "dense_queries", io::ElementType::u32, {qkv.batch, mask_words(qkv.q_tokens)});
  if (text > 0) {
    check_text(input);
    input.keep = last_tokens(text, qkv.batch, qkv.k_tokens);
    input.dense_queries = last_tokens(text, qkv.batch, qkv.q_tokens);
  }
  return input;
}

bool InputFlags::reads_subspaces(const Input& input, const std::string& method, const std::vector<std::string>& set,
                                 const Settings& settings) const {
  if (settings.dense || !row(settings.proxy).codes || row(settings.rule).whole_codes) return false;
  require(input.qkv.subspaces.empty() || !gives(method, set, "partition"), Status::invalid_argument,
          "partition: {} is given for {} beside {}, which are the channel sets in its place", settings.partition, method,
          subspaces.empty() ? "the subspaces of " + path : "--subspaces");
  return true;
}

Shape Input::shape() const {
  return {.batch = qkv.batch,
          .heads = qkv.heads,
          .q_tokens = qkv.q_tokens,
          .k_tokens = qkv.k_tokens,
          .dim = qkv.dim,
          .dtype = qkv.dtype,
          .rope = qkv.rope,
          .subspaces = qkv.subspaces,
          .dense_queries = !dense_queries.empty()};
}

CallArgs Input::args() const {
  const auto pointer = [](const auto& x) { return x.empty() ? nullptr : x.data(); };
  CallArgs args;
  args.q = qkv.view(qkv.q, qkv.q_tokens);
  args.k = qkv.view(qkv.k, qkv.k_tokens);
  args.v = qkv.view(qkv.v, qkv.k_tokens);
  args.q_lengths = pointer(q_lengths);
  args.k_lengths = pointer(k_lengths);
  args.keep = pointer(keep);
  args.dense_queries = pointer(dense_queries);
  return args;
}

void Input::check_measurable(const char* flag) const {
  require(q_lengths.empty() && k_lengths.empty(), Status::invalid_argument,
          "{}: not on padded input (the file has q_lengths or k_lengths)", flag);
  require(qkv.q_tokens > 0 && qkv.k_tokens > 0, Status::shape,
          "{}: got {} queries and {} keys, expected at least one of each", flag, qkv.q_tokens, qkv.k_tokens);
}

}  // namespace scope::cli
