// Between the structs of the C ABI and those of the pipeline, field by field.
#pragma once

#include "methods/methods.h"
#include "methods/models.h"
#include "pipeline/call.h"
#include "scope/scope.h"

namespace scope::capi {

ContextOptions to_options(const scope_context_options& from);
Shape to_shape(const scope_shape& from);
// But for the state, the selection and the statistics.
CallArgs to_args(const Plan& plan, const scope_run_args& from);
SelectionOut to_selection(const scope_selection& from);
CallStats to_stats(const scope_call_stats& from);
ModelQuery to_query(const scope_model_query& from);  // family still points to the caller's text

scope_plan_info from_plan(const Plan& plan);
scope_call_stats from_stats(const CallStats& from);
scope_head_stats from_stats(const HeadStats& from);
scope_setting_info from_setting(const Setting& from);
scope_method_info from_method(const Method& from);
scope_model_info from_model(const Model& from);

}  // namespace scope::capi
