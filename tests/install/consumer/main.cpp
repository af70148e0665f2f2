// Attends once through the installed headers and library.
#include <cstdio>
#include <scope/scope.hpp>

int main() {
  const int64_t tokens = 128, dim = 32;
  std::vector<float> q(tokens * dim, 0.5f), k(q), v(q), out(q.size());
  scope_shape shape = scope_attn::make_shape();
  shape.q_tokens = shape.k_tokens = tokens;
  shape.dim = dim;
  scope_attn::Context context(1);
  scope_attn::Plan plan(context, scope_attn::Method().set("partition", "even:2"), shape);
  scope_run_args args = scope_attn::make_args();
  args.q = scope_attn::head_major(q.data(), 1, tokens, dim);
  args.k = scope_attn::head_major(k.data(), 1, tokens, dim);
  args.v = scope_attn::head_major(v.data(), 1, tokens, dim);
  args.out = scope_attn::head_major(out.data(), 1, tokens, dim);
  plan.run(args);
  std::printf("scope %s: out[0] = %g\n", scope_version(), out[0]);
  return out[0] == 0.5f ? 0 : 1;
}
