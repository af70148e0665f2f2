// The models of the source tree that the command was built from.
namespace scope::cli {
extern const char* const kSourceModels;
const char* const kSourceModels = SCOPE_SOURCE_MODELS;
}  // namespace scope::cli
