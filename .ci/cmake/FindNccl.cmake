# The target nvidia::nccl, wherever the library came from.
include(${CMAKE_CURRENT_LIST_DIR}/nvidia_packages.cmake)
ballast_find_nccl()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Nccl REQUIRED_VARS BALLAST_nccl_LIBRARY BALLAST_nccl_INCLUDE)
