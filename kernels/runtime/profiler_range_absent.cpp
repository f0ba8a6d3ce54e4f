#include "kernels/runtime/profiler_range.h"

namespace ballast {

ProfilerRange::ProfilerRange(const std::string&) {}
ProfilerRange::~ProfilerRange() {}

}  // namespace ballast
