// Bytes become left tiles, a step before they are multiplied with lines of quads of x. What the 128 that were added to x make of
// each row is summed beside, by a tile of -128, and added in the end.
// RUN: gossamer-opt %s -p 'expose-storage,lower-amxexpand,canonicalize,cse' | filecheck %s

// CHECK-LABEL: func.func private @region_tile64(
// CHECK-DAG:     %[[LINES:.*]] = memref.alloca() {alignment = 64 : i64} : memref<2x16x64xi8>
// CHECK-DAG:     %[[MIDDLE:.*]] = memref.alloca() {alignment = 64 : i64} : memref<16x64xi8>
// CHECK:         vector.store %{{.*}}, %[[MIDDLE]]
// CHECK:         llvm.call_intrinsic "llvm.x86.avx512.mask.expand.v64i8"
// CHECK:         vector.store %{{.*}}, %[[LINES]]
// CHECK:         %[[W:.*]] = x86.amx.tile_load %[[LINES]]
// CHECK:         %[[X:.*]] = x86.amx.tile_load
// CHECK:         x86.amx.tile_muli %[[W]], %[[X]] zext
// CHECK:         %[[M:.*]] = x86.amx.tile_load %[[MIDDLE]]
// CHECK:         x86.amx.tile_muli %[[W]], %[[M]],
// CHECK-COUNT-5: x86.amx.tile_store
func.func @region(%x: tensor<?x64xi8>, %w: tensor<40x64xi8, "tilemap(reduction=1, columns=64)">, %bias: tensor<40xbf16>) -> tensor<?x40xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%whole: i32):
    %sum = arith.sitofp %whole : i32 to f32
    %b = "kernel.read"(%bias) {map = affine_map<(t, m) -> (m)>} : (tensor<40xbf16>) -> bf16
    %wide = arith.extf %b : bf16 to f32
    %0 = arith.addf %sum, %wide : f32
    %1 = arith.truncf %0 : f32 to bf16
    "kernel.yield"(%1) : (bf16) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "amxexpand", tile = [64]} : (tensor<?x64xi8>, tensor<40x64xi8, "tilemap(reduction=1, columns=64)">) -> tensor<?x40xbf16>
  return %y : tensor<?x40xbf16>
}
