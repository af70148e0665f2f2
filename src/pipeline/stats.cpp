// Turns a call's report and its clock into statistics.
#include "pipeline/stats.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

namespace scope {

namespace {

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

void set_times(const double* seconds, CallStats& stats) {
  const auto at = [&](Moment moment) { return seconds[static_cast<int>(moment)]; };
  stats.check = at(Moment::check);
  stats.group = at(Moment::group);
  stats.encode = at(Moment::encode);
  stats.score = at(Moment::score);
  stats.select = at(Moment::select);
  stats.attend = at(Moment::attend);
  stats.total = std::accumulate(seconds, seconds + kMoments, 0.0);
}

}  // namespace

void clear_measured(CallStats& stats) {
  const double unknown[kMoments] = {kUnknown, kUnknown, kUnknown, kUnknown, kUnknown, kUnknown, kUnknown, kUnknown};
  set_times(unknown, stats);
  stats.density = stats.total_density = kUnknown;
}

void read_report(const Plan& plan, const void* report, CallStats* stats, HeadStats* heads) {
  uint32_t status = 0;
  std::memcpy(&status, report, sizeof status);
  // Means over the heads that selected; 1 where none did.
  double density = 0, total = 0;
  int64_t selecting = 0;
  const int64_t n = plan.shape.batch * plan.shape.heads;
  for (int64_t i = 0; i < n; ++i) {
    HeadStats head;  // a copy on the host may lie anywhere
    std::memcpy(&head, static_cast<const std::byte*>(report) + ReportLayout::kHeads + i * sizeof head, sizeof head);
    if (heads != nullptr) heads[i] = head;
    total += head.total_density;
    if (head.groups == 0) continue;
    density += head.density;
    ++selecting;
  }
  if (stats != nullptr) {
    stats->density = selecting == 0 ? 1.0 : density / static_cast<double>(selecting);
    stats->total_density = total / static_cast<double>(n);
  }
  require((status & kStateNotFilled) == 0, Status::invalid_argument,
          "state: a warm call found one that was not initialised for this plan, or not filled by a first call; its output "
          "means nothing");
  require((status & kNotFinite) == 0 || !plan.settings.check_finite, Status::non_finite,
          "q or k: a row that was to be clustered holds NaN or Inf, or its norm overflows; such rows were left out");
}

void finish_stats(const Plan& plan, const Exec& exec, const CallArgs& args, const void* report, CallStats* stats) {
  std::vector<std::byte> copy;  // a device's report; the host's is read where it is
  if (!plan.backend->can.host) {
    copy.resize(static_cast<size_t>(plan.report_bytes));
    plan.backend->read(exec, report, copy.data(), plan.report_bytes);
    report = copy.data();
  }
  double seconds[kMoments] = {};
  if (stats != nullptr && exec.call != nullptr && exec.clock->times(exec, seconds)) set_times(seconds, *stats);
  read_report(plan, report, stats, args.head_stats);
}

}  // namespace scope
