# OneDnn::onednn, the library oneDNN: the CMake files of Debian's package require OpenCL, which Ballast does not need.
find_path(ONEDNN_INCLUDE_DIR oneapi/dnnl/dnnl.hpp)
find_library(ONEDNN_LIBRARY dnnl)
mark_as_advanced(ONEDNN_INCLUDE_DIR ONEDNN_LIBRARY)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(OneDnn REQUIRED_VARS ONEDNN_LIBRARY ONEDNN_INCLUDE_DIR)

if(OneDnn_FOUND AND NOT TARGET OneDnn::onednn)
  add_library(OneDnn::onednn UNKNOWN IMPORTED)
  set_target_properties(OneDnn::onednn PROPERTIES
    IMPORTED_LOCATION ${ONEDNN_LIBRARY}
    INTERFACE_INCLUDE_DIRECTORIES ${ONEDNN_INCLUDE_DIR})
endif()
