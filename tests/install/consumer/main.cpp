// Attends through the installed headers and library: once, and as a program that makes videos does.
#include <cstdio>
#include <scope/scope.hpp>

// docs/guide/first_call.md shows the lines between the marks.
static double make_video(const scope_attn::Context& context, scope_shape shape, scope_run_args args) {
  const int64_t layers = 2, branches = 2, steps = 5;
  // begin
  auto method = scope_attn::Method("scope-mean").model("wan2.1-t2v-14b").set("target_density", "0.2");
  scope_attn::Plan plan(context, method, shape);  // once, for all layers and steps
  std::vector<scope_attn::State> states;          // one for each layer and branch
  for (int64_t i = 0; i < layers * branches; ++i) states.emplace_back(plan);

  for (int64_t step = 0; step < steps; ++step) {
    for (int64_t branch = 0; branch < branches; ++branch) {
      for (int64_t layer = 0; layer < layers; ++layer) {
        // your model computes q, k and v here
        args.layer = layer;
        args.step = step;
        args.steps = steps;
        args.state = states[static_cast<size_t>(layer * branches + branch)].handle();
        plan.run(args);
      }
    }
  }
  // end
  scope_call_stats stats = scope_attn::make_stats();
  args.stats = &stats;
  plan.run(args);
  return stats.warm == 1 ? stats.density : -1;
}

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
  const double density = make_video(context, shape, args);
  std::printf("scope %s: out[0] = %g, then %g of the keys\n", scope_version(), out[0], density);
  return out[0] == 0.5f && density > 0 ? 0 : 1;
}
