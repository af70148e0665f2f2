// The commit that this was built from.
#pragma once

namespace scope {

// 40 digits, with a "+" where files differed from them; "unknown" without git.
const char* built_from();

}  // namespace scope
