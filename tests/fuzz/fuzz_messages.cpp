// libFuzzer's entry; README.md says how to run it.
#include "tests/fuzz/messages.h"

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* bytes, std::size_t count) {
  const std::string_view text(reinterpret_cast<const char*>(bytes), count);
  ballast::testing::read_as_hub(text);
  ballast::testing::read_as_text(std::string(text));
  return 0;
}
