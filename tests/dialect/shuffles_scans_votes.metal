//@ in x=np.arange(1, 33, dtype=np.uint32)
//@ out y:uint32[32,6]
//@ run grid=(32,1,1) threadgroup=(32,1,1)
//@ want (y[:,0] == np.r_[0, np.cumsum(x)[:-1]]).all() and (y[:,1] == np.cumsum(x)).all() and (y[:,2] == x[5]).all() and (y[:31,3] == x[1:]).all() and (y[:,4] == 0x55555555).all() and (y[:,5] == 1).all()
//@ body
uint l = thread_index_in_simdgroup;
y[l * 6 + 0] = simd_prefix_exclusive_sum(x[l]);
y[l * 6 + 1] = simd_prefix_inclusive_sum(x[l]);
y[l * 6 + 2] = simd_broadcast(x[l], 5);
y[l * 6 + 3] = simd_shuffle_down(x[l], 1);
y[l * 6 + 4] = uint(simd_vote::vote_t(simd_ballot(l % 2 == 0)));
y[l * 6 + 5] = simd_any(l == 7) && !simd_all(l == 7) && (l != 0 || simd_is_first()) ? 1 : 0;
