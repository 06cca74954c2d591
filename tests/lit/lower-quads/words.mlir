// Without dot products of bytes, x is packed as pairs of words, and a quad is two products of pairs.
// RUN: gossamer-opt %s -p 'expose-storage,lower-quads,canonicalize,cse' | filecheck %s

// CHECK-LABEL: func.func private @region_tile16(
// CHECK:         %[[PACKED:.*]] = memref.view %{{.*}} : memref<?xi8> to memref<64x32xi16>
// CHECK:         arith.extsi %{{.*}} : vector<32xi8> to vector<32xi16>
// CHECK:         scf.for %{{.*}} step %c4 iter_args(
// CHECK:           arith.extsi %{{.*}} : vector<4xi8> to vector<4xi16>
// CHECK:           llvm.call_intrinsic "llvm.x86.avx512.pmaddw.d.512"
// CHECK:           arith.addi
// CHECK:           llvm.call_intrinsic "llvm.x86.avx512.pmaddw.d.512"
// CHECK-NOT:     vpdpbusd
func.func @region(%x: tensor<?x70xi8>, %w: tensor<40x70xi8, "quads(reduction=1, rows=1, width=72)">, %scale: tensor<40xf32>) -> tensor<?x40xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: i32):
    %s = "kernel.read"(%scale) {map = affine_map<(t, m) -> (m)>} : (tensor<40xf32>) -> f32
    %0 = arith.sitofp %sum : i32 to f32
    %1 = arith.mulf %0, %s : f32
    "kernel.yield"(%1) : (f32) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "quads", tile = [64, 1024, 2]} : (tensor<?x70xi8>, tensor<40x70xi8, "quads(reduction=1, rows=1, width=72)">) -> tensor<?x40xf32>
  return %y : tensor<?x40xf32>
}
