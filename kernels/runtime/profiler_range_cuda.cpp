#include <nvtx3/nvToolsExt.h>

#include "kernels/runtime/profiler_range.h"

namespace ballast {

ProfilerRange::ProfilerRange(const std::string& name) { nvtxRangePushA(name.c_str()); }
ProfilerRange::~ProfilerRange() { nvtxRangePop(); }

}  // namespace ballast
