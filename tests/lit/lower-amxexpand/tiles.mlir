// Bits and nonzeros become tiles, which are multiplied as dense.
// RUN: gossamer-opt %s -p 'expose-storage,lower-amxexpand,canonicalize,cse' | filecheck %s

// 16 lines for each half of the rows go to memory; from there they are the right tiles. The place among the values is carried
// along with the tiles of sums.
// CHECK-LABEL: func.func private @region_tile32(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x64xbf16>,
// CHECK:         %[[LINES:[a-z0-9_]*]] = memref.view %{{.*}} : memref<?xi8> to memref<2x16x32xbf16>
// CHECK:         scf.for %{{[a-z0-9]*}} = %c0 to %c2 step %c1 iter_args(%[[PLACE:[a-z0-9]*]] = %{{[a-z0-9]*}}, %[[S0:[a-z0-9]*]] = %{{[a-z0-9_]*}},
// CHECK:           scf.for %[[PAIR:[a-z0-9]*]] = %c0 to %c16 step %c1 iter_args(%{{[a-z0-9]*}} = %[[PLACE]])
// CHECK:             llvm.call_intrinsic "llvm.x86.avx512.mask.expand.v32i16"
// CHECK:             vector.store %{{.*}}, %[[LINES]][%c0, %[[PAIR]], %c0]
// CHECK:             llvm.call_intrinsic "llvm.x86.avx512.mask.expand.v32i16"
// CHECK:             vector.store %{{.*}}, %[[LINES]][%c1, %[[PAIR]], %c0]
// CHECK:           %[[W0:[a-z0-9]*]] = x86.amx.tile_load %[[LINES]][%c0, %c0, %c0]
// CHECK:           %[[X0:[a-z0-9]*]] = x86.amx.tile_load %[[X]]
// CHECK-NEXT:      x86.amx.tile_mulf %[[X0]], %[[W0]], %[[S0]]
// CHECK-COUNT-3:   x86.amx.tile_mulf
// CHECK-COUNT-4: x86.amx.tile_store
// CHECK-LABEL: func.func private @region_tile16(
// CHECK-LABEL: func.func private @region_copied16(
func.func @region(%x: tensor<?x64xbf16>, %w: tensor<40x64xbf16, "vnnimap(reduction=1, rows=32)">, %bias: tensor<40xbf16>) -> tensor<?x40xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %b = "kernel.read"(%bias) {map = affine_map<(t, m) -> (m)>} : (tensor<40xbf16>) -> bf16
    %wide = arith.extf %b : bf16 to f32
    %0 = arith.addf %sum, %wide : f32
    %1 = arith.truncf %0 : f32 to bf16
    "kernel.yield"(%1) : (bf16) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "amxexpand", tile = [32, 32]} : (tensor<?x64xbf16>, tensor<40x64xbf16, "vnnimap(reduction=1, rows=32)">) -> tensor<?x40xbf16>
  return %y : tensor<?x40xbf16>
}
