// Apart from all other code, since it is compiled again after each commit.
#include "core/built_from.h"

#include "commit.h"

namespace scope {

const char* built_from() { return SCOPE_COMMIT; }

}  // namespace scope
