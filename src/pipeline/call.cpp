// One call: check, then for each sample and chunk of heads group, encode, score, select, tail, attend.
#include "pipeline/call.h"

#include <algorithm>
#include <cmath>

#include "pipeline/check_args.h"
#include "pipeline/frame.h"
#include "pipeline/selection.h"
#include "pipeline/stage_args.h"
#include "pipeline/stats.h"
#include "pipeline/warm.h"

namespace scope {

namespace {

Frame make_frame(const Plan& plan, const CallArgs& args) {
  Frame frame{.plan = plan,
              .args = args,
              .backend = *plan.backend,
              .exec = plan.exec,
              .at = plan.layout(args.workspace, args.workspace_bytes),
              .status = nullptr,
              .report = nullptr,
              .scale = args.scale > 0 ? args.scale : 1.0f / std::sqrt(static_cast<float>(plan.shape.dim))};
  frame.exec.stream = args.stream;
  frame.exec.call = args.stats == nullptr ? nullptr : args.workspace;
  if (args.clock != nullptr) frame.exec.clock = args.clock;
  void* report = args.report != nullptr ? args.report : frame.at.report;
  frame.status = ReportLayout::status(report);
  frame.report = ReportLayout::heads(report);
  return frame;
}

class Call {
 public:
  Call(const Plan& plan, const CallArgs& args)
      : plan_(plan),
        args_(args),
        settings_(plan.settings),
        shape_(plan.shape),
        backend_(*plan.backend),
        scope_(plan),
        frame_(make_frame(plan, args)),
        exec_(frame_.exec) {
    stats_.reason = schedule(settings_, args.place);
    stats_.kernel = backend_.kernel(exec_);
    stats_.arithmetic = backend_.arithmetic(exec_, shape_.dtype, settings_.products);
    frame_.mark(Moment::check);
    backend_.fill(exec_, frame_.status, 0, 0, 1, 1);
  }

  void run() {
    const bool prefix = clusters_in_prefix(settings_, stats_.reason) && args_.state != nullptr;
    const bool clusters = sparse() || prefix;
    check();
    stats_.warm = args_.state != nullptr && clusters;
    bool selected = false, reused = false;
    for (int64_t b = 0; b < shape_.batch; ++b) {
      const Sample s = describe(b);
      write_keep(frame_, s);
      Start start;
      if (clusters && s.can_select()) {
        start = open_state(frame_, s);
        stats_.warm = stats_.warm && start.warm;
        reused = reused || start.reused;
      }
      const bool selects = sparse() && s.can_select();
      selected = selected || selects;
      const bool together = selects && plan_.solves_sample();
      if (together) solve(s, start);
      each_chunk(together, [&](const Frame& frame, Chunk chunk) {
        if (clusters && s.can_select() && !together) cluster(frame, s, chunk, start);
        if (selects) {
          if (together) {
            frame.mark(Moment::select);
          } else {
            weigh(frame, s, chunk, start.slot);
          }
          keep(frame, s, chunk, start.slot);
          AttendArgs args = attend_args(frame, s, chunk);
          add_tail(frame, start.slot, args);
          attend(args);
        } else {
          frame.mark(Moment::other);
          write_dense(frame, s, chunk, !sparse());
          attend(attend_dense_args(frame, s, chunk));
        }
      });
      frame_.mark(Moment::other);
      if (!selects) backend_.finish(exec_, finish_dense_args(frame_, s));
      if (clusters && s.can_select()) close_state(frame_, s, start);
    }
    if (sparse() && !selected) stats_.reason = Reason::nothing_to_select;
    stats_.warm = stats_.warm && (stats_.iterations > 0 || reused);
    end();
  }

  void run_selected(const SelectedArgs& selected) {
    stats_.reason = Reason::sparse;
    check();
    const int64_t words = mask_words(shape_.k_tokens), groups = plan_.selection_groups;
    for (int64_t b = 0; b < shape_.batch; ++b) {
      const Sample s = describe(b);
      for (int64_t h = 0; h < shape_.heads; h += plan_.chunk) {
        const Chunk chunk{h, std::min(plan_.chunk, shape_.heads - h)};
        const int64_t head = b * shape_.heads + h;
        const Workspace& at = frame_.at;
        backend_.import_selection(exec_, {.tokens = s.tokens,
                                          .valid_keys = at.valid,
                                          .valid_queries = at.queries,
                                          .heads = chunk.count,
                                          .groups = groups,
                                          .row_groups = plan_.groups + 1,
                                          .labels = selected.labels + head * shape_.q_tokens,
                                          .selected = selected.mask + head * groups * words,
                                          .keep = selected.keep == nullptr ? nullptr : selected.keep + b * words,
                                          .order = at.order,
                                          .offsets = at.offsets,
                                          .mask = at.mask,
                                          .kept = at.keep});
        AttendArgs args = attend_args(frame_, s, chunk);
        args.keep = selected.keep == nullptr ? nullptr : at.keep;
        attend(args);
      }
      backend_.finish(exec_, finish_dense_args(frame_, s));
    }
    end();
  }

 private:
  bool sparse() const { return stats_.reason == Reason::sparse; }

  // Calls that select nothing refuse what the others would, so that a schedule does not hide it.
  void check() const {
    if (settings_.check_finite) check_finite(plan_, exec_, args_);
  }

  Sample describe(int64_t b) {
    frame_.mark(Moment::other);
    const Sample s = describe_sample(shape_, args_, b);
    const Workspace& at = frame_.at;
    backend_.describe(exec_, {.tokens = s.tokens,
                              .masks = s.masks,
                              .q_rows = at.q_rows,
                              .k_rows = at.k_rows,
                              .valid = at.valid,
                              .kept = at.keep,
                              .queries = at.queries,
                              .offsets = at.all_queries});
    return s;
  }

  // body(frame, chunk) for all heads of a sample. `together`: they wait for one another, each with a place of its own.
  template <class Body>
  void each_chunk(bool together, const Body& body) {
    for (int64_t h = 0; h < shape_.heads; h += plan_.chunk) {
      const Chunk chunk{h, std::min(plan_.chunk, shape_.heads - h)};
      if (!together) {
        body(frame_, chunk);
        continue;
      }
      Frame frame = frame_;
      frame.at = plan_.layout(args_.workspace, args_.workspace_bytes, h);
      body(frame, chunk);
    }
  }

  // One rho for the whole sample, from what all its heads weigh.
  void solve(const Sample& s, const Start& start) {
    each_chunk(true, [&](const Frame& frame, Chunk chunk) {
      cluster(frame, s, chunk, start);
      weigh(frame, s, chunk, start.slot);
    });
    backend_.solve(exec_, solve_args(frame_, s, start.slot));
  }

  // group and encode, from the state and back into it.
  void cluster(const Frame& frame, const Sample& s, Chunk chunk, const Start& start) {
    if (start.reused) {
      frame.mark(Moment::group);
      return reuse_clusters(frame, s, chunk, start.slot);
    }
    stats_.iterations = iterations_of(settings_, start);
    frame.mark(Moment::other);
    if (start.warm) load_clusters(frame, s, chunk, start.slot);
    const GroupArgs queries = group_args(frame, s, chunk, start);
    const EncodeArgs keys = encode_args(frame, s, chunk, start);
    frame.mark(Moment::group);
    if (row(settings_.group).with_keys) {
      backend_.cocluster(exec_, {queries, keys});
    } else {
      backend_.group(exec_, queries);
      frame.mark(Moment::encode);
      if (keys.codes > 0) backend_.encode(exec_, keys);
    }
    frame.mark(Moment::other);
    if (args_.state != nullptr) save_clusters(frame, s, chunk, start.slot);
  }

  // The parts of groups that tail means has, anew in each call: a state of them would be 8 times as large.
  void split(const Frame& frame, const Sample& s, Chunk chunk, const StateSlot& slot) const {
    if (plan_.parts() == 0) return;
    frame.mark(Moment::group);
    backend_.split(exec_, split_args(frame, s, chunk, slot));
    round_rows(frame.at.part_centroids, plan_.groups * plan_.parts(), slot.groups * plan_.parts(), chunk);
    frame.mark(Moment::select);
  }

  // score, and what select must know of every row before anything is kept.
  void weigh(const Frame& frame, const Sample& s, Chunk chunk, const StateSlot& slot) {
    frame.mark(Moment::score);
    if (row(settings_.proxy).codes) {
      backend_.score(exec_, score_args(frame, chunk, slot));
    } else {
      round_rows(frame.at.centroids, plan_.groups, slot.groups, chunk);
    }
    frame.mark(Moment::select);
    if (plan_.compensates()) backend_.compensate(exec_, compensate_args(frame, s, chunk, slot));
    const double alpha = least_share(settings_, args_.place, chunk.first);  // with a profile, a chunk is one head
    backend_.weigh(exec_, weigh_args(frame, s, chunk, slot, &alpha));
  }

  // To the inputs' type, in which the exact proxy multiplies; the state has them as they were.
  void round_rows(float* rows, int64_t most, int64_t used_rows, Chunk chunk) const {
    if (shape_.dtype == DType::f32) return;
    const int64_t used = used_rows * shape_.dim, per_head = most * shape_.dim;
    const int64_t steps = used == per_head ? 1 : chunk.count, count = used == per_head ? chunk.count * per_head : used;
    for (int64_t i = 0; i < steps; ++i) {
      float* centroids = rows + i * per_head;
      backend_.round_to(exec_, shape_.dtype, centroids, centroids, count);
    }
  }

  // select and tail: which keys each group keeps, and what stands for the others.
  void keep(const Frame& frame, const Sample& s, Chunk chunk, const StateSlot& slot) {
    split(frame, s, chunk, slot);
    const double alpha = least_share(settings_, args_.place, chunk.first);
    KeepArgs keys = keep_args(frame, s, chunk, weigh_args(frame, s, chunk, slot, &alpha));
    const TailArgs tail = tail_args(frame, s, chunk, slot);
    const bool at_once = backend_.can.mean_in_keep && tail.tail == Tail::mean && !plan_.rule().whole_codes;
    if (at_once) keys.mean = &tail;
    backend_.keep(exec_, keys);
    if (tail.tail != Tail::none && !at_once) backend_.tail(exec_, tail);
    frame.mark(Moment::other);
    backend_.finish(exec_, finish_args(frame, s, chunk, slot));
    write_selection(frame, s, chunk, slot);
  }

  void attend(const AttendArgs& args) {
    if (args_.out.data == nullptr) return;
    frame_.mark(Moment::attend);
    backend_.attend(exec_, args);
  }

  void end() {
    frame_.mark(Moment::end);
    if (backend_.can.host) {
      finish_stats(plan_, exec_, args_, frame_.status, &stats_);
    } else {
      clear_measured(stats_);
    }
    if (args_.stats != nullptr) *args_.stats = stats_;
  }

  const Plan& plan_;
  const CallArgs& args_;
  const Settings& settings_;
  const Shape& shape_;
  const Backend& backend_;
  const DeviceScope scope_;
  const Frame frame_;
  const Exec& exec_;
  CallStats stats_;
};

}  // namespace

void call(const Plan& plan, const CallArgs& args) {
  const bool attends = args.out.data != nullptr || plan.shape.q_tokens == 0;
  check_args(plan, args, attends);
  require(attends || !plan.settings.dense, Status::invalid_argument, "out: got null, and method dense selects nothing");
  require(attends || args.lse == nullptr, Status::invalid_argument, "lse: got one without out");
  // A dense step under warm_prefix may only cluster, beside a host's own dense attention.
  require(attends || !plan.needs_v() || schedule(plan.settings, args.place) != Reason::sparse, Status::invalid_argument,
          "out: got null, and a sparse call with tail {} and rule {} needs v and out", plan.tail().name, plan.rule().name);
  if (args.state != nullptr) {
    require(!plan.settings.dense, Status::invalid_argument, "state: got one, and method dense keeps none");
    args.state->check(plan);
  }
  Call(plan, args).run();
}

void attend_selected(const Plan& plan, const CallArgs& args, const SelectedArgs& selected) {
  check_args(plan, args, true);
  check_selection(plan, args, selected);
  Call(plan, args).run_selected(selected);
}

void read_stats(const Plan& plan, const CallArgs& args) {
  const DeviceScope scope(plan);
  const Frame frame = make_frame(plan, args);
  finish_stats(plan, frame.exec, args, frame.status, args.stats);
}

}  // namespace scope
