// Makes q, k and v one input, of arrays or of a synthetic video.
#include "qkv.h"

#include <fmt/format.h>

#include <cstring>

#include "core/numeric.h"

namespace scope::cli {

namespace {

DType dtype_of(const char* name, const io::Array& array) {
  switch (array.type) {
    case io::ElementType::f32:
      return DType::f32;
    case io::ElementType::f16:
      return DType::f16;
    case io::ElementType::bf16:
      return DType::bf16;
    default:
      fail(Status::dtype, "{}: got {}, expected f32, f16 or bf16", name, io::element_name(array.type));
  }
}

std::string shape_text(const std::vector<int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

}  // namespace

TensorView Qkv::view(const io::Array& x, int64_t tokens) const {
  return {x.data.data(), dtype, batch, heads, tokens, dim, heads * tokens * dim, tokens * dim, dim};
}

Qkv make_qkv_input(io::Array q, io::Array k, io::Array v) {
  Qkv out;
  out.dtype = dtype_of("q", q);
  for (const auto& [name, array] : {std::pair<const char*, const io::Array&>{"k", k}, {"v", v}}) {
    require(dtype_of(name, array) == out.dtype, Status::dtype, "{}: got {}, expected q's {}", name,
            io::element_name(array.type), dtype_name(out.dtype));
  }
  require(q.shape.size() == 3 || q.shape.size() == 4, Status::shape,
          "q: got shape {}, expected [batch, heads, tokens, dim] or [heads, tokens, dim]", shape_text(q.shape));
  require(k.shape.size() == q.shape.size(), Status::shape, "k: got shape {}, expected the rank of q's {}",
          shape_text(k.shape), shape_text(q.shape));
  require(v.shape == k.shape, Status::shape, "v: got shape {}, expected k's {}", shape_text(v.shape), shape_text(k.shape));
  const size_t at = q.shape.size() - 3;
  out.batched = at == 1;
  out.batch = out.batched ? q.shape[0] : 1;
  out.heads = q.shape[at];
  out.q_tokens = q.shape[at + 1];
  out.dim = q.shape[at + 2];
  out.k_tokens = k.shape[at + 1];
  require((!out.batched || k.shape[0] == out.batch) && k.shape[at] == out.heads && k.shape[at + 2] == out.dim, Status::shape,
          "k: got shape {}, expected q's {} but for the token count", shape_text(k.shape), shape_text(q.shape));
  out.q = std::move(q);
  out.k = std::move(k);
  out.v = std::move(v);
  return out;
}

Qkv synthetic_qkv(const SyntheticSpec& spec, const std::string& dtype, ThreadPool& pool, const std::function<void()>& done) {
  const SyntheticQkv made = make_qkv(spec, pool, done);
  const auto convert = [&](const std::vector<float>& x) {
    io::Array array{io::ElementType::f32, {made.heads, made.tokens, made.dim}, {}};
    if (dtype == "f32") {
      array.data.resize(x.size() * 4);
      std::memcpy(array.data.data(), x.data(), array.data.size());
      return array;
    }
    array.type = dtype == "f16" ? io::ElementType::f16 : io::ElementType::bf16;
    array.data.resize(x.size() * 2);
    for (size_t i = 0; i < x.size(); ++i) {
      const uint16_t bits = dtype == "f16" ? f32_to_f16(x[i]) : f32_to_bf16(x[i]);
      std::memcpy(array.data.data() + 2 * i, &bits, 2);
    }
    return array;
  };
  Qkv qkv = make_qkv_input(convert(made.q), convert(made.k), convert(made.v));
  qkv.rope = spec.rope;
  return qkv;
}

}  // namespace scope::cli
