// Defines the operators in C++ programs that open this library to run an AOTInductor package. `import kernel_fusion` defines
// them first, because an operator cannot be defined twice.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <sstream>
#include <string>

#include "schemas.h"

namespace kf {
namespace {

torch::Library* defined() {
  if (c10::Dispatcher::singleton().findSchema({"kernel_fusion::layer_norm", ""})) return nullptr;
  static torch::Library library(torch::Library::FRAGMENT, "kernel_fusion", std::nullopt, __FILE__, __LINE__);
  std::istringstream schemas(kSchemas);
  for (std::string schema; std::getline(schemas, schema);) {
    if (!schema.empty()) library.def(torch::schema(schema.c_str()), {at::Tag::pt2_compliant_tag});
  }
  return &library;
}

const auto* const library = defined();

}  // namespace
}  // namespace kf
